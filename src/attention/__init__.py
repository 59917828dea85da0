"""Attention over paged key/value blocks: the blocks are held until the kernel is done."""

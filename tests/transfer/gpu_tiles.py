"""What `transfer.kernels.move_tiles` does, tile by tile on host memory."""

import ctypes

from transfer._staging import COLUMNS


def move_tiles(  # noqa: PLR0917 - a kernel's arguments are positional
    word: int,
    table: int,
    tiles: int,
    blocks: int,
    src_ids: int,
    dst_ids: int,
    src_at: int,
    dst_at: int,
) -> None:
    """What `transfer.kernels.move_tiles` does, tile by tile."""
    rows = (ctypes.c_int64 * (tiles * COLUMNS)).from_address(table)
    sources = (ctypes.c_int64 * blocks).from_address(src_ids) if src_ids else range(blocks)
    targets = (ctypes.c_int64 * blocks).from_address(dst_ids) if dst_ids else range(blocks)
    for block in range(blocks):
        for tile in range(tiles):
            src, src_step, dst, dst_step, words = rows[tile * COLUMNS : (tile + 1) * COLUMNS]
            ctypes.memmove(
                dst_at + dst + targets[block] * dst_step,
                src_at + src + sources[block] * src_step,
                words * word,
            )

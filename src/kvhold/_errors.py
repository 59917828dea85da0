"""What a user can put right: errors whose message is one line for the user."""

from __future__ import annotations


class UserError(Exception):
    """Something that the user can put right; the message is one line for the user."""

"""Short names for the sample blobs that the tests of formats and codecs turn over."""

from tiers.testing import IDENTITY
from tiers.testing import sample_blob as encode
from tiers.testing import sample_codecs as codecs
from tiers.testing import sample_page as page
from tiers.testing import sample_source as source

__all__ = ["IDENTITY", "codecs", "encode", "page", "source"]

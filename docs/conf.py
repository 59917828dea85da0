"""How the documentation is built: `make docs`, with every warning an error."""

from importlib.metadata import version as installed_version

project = "kvhold"
author = "The kvhold authors"
copyright = "The kvhold authors"  # noqa: A001 - Sphinx reads this name
version = release = installed_version("kvhold")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
root_doc = "index"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# The documentation builds where there is no GPU.
autodoc_mock_imports = ["cuda", "flashinfer", "tvm_ffi"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"kvhold {release}"

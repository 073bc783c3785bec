"""Sphinx configuration of the documentation site; `make docs` builds it."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "ext"), str(HERE.parent)]
os.environ.setdefault("KERAS_BACKEND", "torch")  # the public API is the same, and TensorFlow takes long to import

import lightning.pytorch  # noqa: E402, F401  (decides which Lightning ElasticFlowStrategy is for)

project = "ElasticFlow"
author = "The ElasticFlow authors"
try:
    version = release = metadata.version("elasticflow-training")
except metadata.PackageNotFoundError:  # a checkout that is not installed
    version = release = "unknown"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
    "generated",
]
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
smartquotes = False
default_role = "code"  # docstrings mark code with single backticks
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_rtype = False
copybutton_prompt_text = r"^\$ "
copybutton_prompt_is_regexp = True
exclude_patterns = ["ext"]

html_theme = "furo"
html_title = "ElasticFlow"
html_copy_source = False
html_show_sphinx = False

"""How Sphinx makes the site. `make docs` builds it into out/site, without network; a warning is an error."""

from __future__ import annotations

project = "lowtide"
author = "The lowtide authors"
copyright = "The lowtide authors, Apache-2.0"
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["__pycache__"]
nitpicky = True
highlight_language = "text"  # what has no language of its own is a drawing or an output

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3  # headings that pages may link to

copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

pygments_dark_style = "github-dark"
html_theme = "furo"
html_title = "lowtide"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_use_index = False
html_domain_indices = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00695c", "color-brand-content": "#00695c"},
    "dark_css_variables": {"color-brand-primary": "#4db6ac", "color-brand-content": "#4db6ac"},
}

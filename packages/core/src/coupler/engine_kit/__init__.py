"""Parts that training engines share, for plugins to build upon."""

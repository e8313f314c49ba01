"""Methods for chains of layers, one file per source."""

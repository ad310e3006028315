"""Speed of the forward pass beside the installed peers, over a sweep and named shapes."""

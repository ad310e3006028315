"""Speed of the forward pass beside whatever else is installed, over a sweep of shapes."""

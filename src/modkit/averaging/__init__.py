"""Weight averaging: which tensors belong together, and how one step of an average is taken."""

"""modkit in the trainers of others; each module needs the package that it is named after."""

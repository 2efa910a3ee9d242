"""`plan`: what a training needs and takes, on machines that need not exist."""

"""Tools for testing elastic training, shipped so that you can test your own."""

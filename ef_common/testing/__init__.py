"""Tools to test elastic training with, shipped so that you can test your own."""

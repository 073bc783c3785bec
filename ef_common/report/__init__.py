"""A run over time: as one HTML file (`elasticflow report`), as a live page and as metrics (`status --serve`)."""

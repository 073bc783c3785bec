"""A run over time: as an HTML file (`elasticflow report`), or as a live page with metrics (`status --serve`)."""

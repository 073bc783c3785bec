"""`elasticflow run --hosts`: a training on machines that ssh reaches."""

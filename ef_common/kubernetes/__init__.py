"""Trainings in a Kubernetes cluster: the resource `ElasticJob`, its controller, and the commands of a user."""

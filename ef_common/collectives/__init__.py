"""The data plane: one process group per view, behind the port :class:`~ef_common.session.ports.Group`."""

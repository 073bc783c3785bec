"""What all tests, and the processes that they start, have in common."""

from __future__ import annotations

import os

# Of gcsfs, which reads it when it is imported: or it asks a gRPC server, which no emulator has, for the kind of bucket.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

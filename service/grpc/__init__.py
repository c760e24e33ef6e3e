"""The Open Inference Protocol over gRPC: another way into the same queues, beside HTTP."""

import ctypes
import os

# Its own lines, as of each connection without TLS, know no level and no JSON. A user's value stays, without
# being read here.
ctypes.CDLL(None).setenv(b"GRPC_VERBOSITY", b"NONE", 0)
# Read when gRPC is first used. Its handlers of fork() can end the child before it runs another program.
os.putenv("GRPC_ENABLE_FORK_SUPPORT", "0")

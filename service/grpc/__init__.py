"""The Open Inference Protocol over gRPC: another way into the same queues, beside HTTP."""

import os

# Its own lines, as of each connection without TLS, know no level and no JSON.
if "GRPC_VERBOSITY" not in os.environ:
    os.putenv("GRPC_VERBOSITY", "NONE")
# Read when gRPC is first used. Its handlers of fork() can end the child before it runs another program.
os.putenv("GRPC_ENABLE_FORK_SUPPORT", "0")

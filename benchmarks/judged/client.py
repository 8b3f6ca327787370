"""What a judge runs as its command: asks the warm process for a job, and ends as that ends.

Nothing is imported but what Python needs to start: it is started hundreds of times.
"""

import json
import os
import socket
import sys


def main() -> int:
    request = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "directory": os.getcwd(),  # noqa: PTH109 (pathlib is not imported)
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(os.environ["COHERENT_RAY_JUDGED"])
        socket.send_fds(connection, [json.dumps(request).encode()], [1, 2])
        return (connection.recv(1) or b"\1")[0]


if __name__ == "__main__":
    sys.exit(main())

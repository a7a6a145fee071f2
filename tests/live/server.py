"""The program of a live rank process: runs functions that the test sends.

Executed by path under `stratacl launch`. Its one argument is the name of an
abstract Unix socket; a closed connection is the order to end.
"""

import faulthandler
import importlib
import os
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection

ODD_FLAGS = "LIVE_RANKS_ODD_XLA_FLAGS"


def main(name: str) -> None:
    if int(os.environ["STRATACL_PROCESS_ID"]) % 2 == 1:
        os.environ["XLA_FLAGS"] = os.environ[ODD_FLAGS]
    # Stacks on demand, to stderr, without ending the process.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    link = socket.socket(socket.AF_UNIX)
    link.connect("\0" + name)
    orders = Connection(link.detach())
    import jax

    orders.send((jax.process_index(), os.getpid()))
    while True:
        try:
            module, function, args, kwargs = orders.recv()
        except EOFError:
            return
        try:
            target = importlib.import_module(module)
            for part in function.split("."):
                target = getattr(target, part)
            answer = (True, target(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            orders.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    # By its name, so that functions which import it find this copy.
    main(sys.argv[1])

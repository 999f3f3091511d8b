"""`accelerate launch` with two processes of this machine, as its users start it."""

import socket


def two_processes() -> list[str]:
    """Arguments between the interpreter and `-m steadygaze`, with a free port: 0 hangs before torch 2.7."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    return [*launch, "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(port)]

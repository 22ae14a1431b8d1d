#!/usr/bin/env bash
# pyzmq 27.3.0: without the option IPV6, connecting to an IPv6 address succeeds, and nothing ever arrives.
#
# Expected: `connect` refuses an address that the socket cannot use, as `bind` does.
# Actual: `bind` raises "No such device" for an IPv6 address. `connect` to the same address returns normally, and messages
#   are never delivered. With `IPV6` set to 1, both work.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check 'pyzmq==27.3.0'
cat >"$work/run.py" <<'PY'
import sys

import zmq

context = zmq.Context()
server = context.socket(zmq.PULL)
server.setsockopt(zmq.IPV6, 1)
port = server.bind_to_random_port("tcp://[::1]")


def received(ipv6):
    client = context.socket(zmq.PUSH)
    client.setsockopt(zmq.LINGER, 0)
    client.setsockopt(zmq.IPV6, ipv6)
    client.connect(f"tcp://[::1]:{port}")
    client.send(b"x")
    arrived = bool(server.poll(3000))
    if arrived:
        server.recv()
    client.close()
    return arrived


def bound():
    socket = context.socket(zmq.PULL)
    try:
        socket.bind("tcp://[::1]:*")
    except zmq.ZMQError as error:
        return str(error)
    finally:
        socket.close()
    return "no error"


default, with_option, error = received(0), received(1), bound()
print(f"libzmq {zmq.zmq_version()}, pyzmq {zmq.__version__}")
print(f"bind without IPV6: {error}; connect without IPV6: no error, arrived: {default}; with IPV6: {with_option}")
server.close()
sys.exit(0 if not default and with_option and error != "no error" else 1)
PY
"$work/venv/bin/python" "$work/run.py"

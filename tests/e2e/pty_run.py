"""Runs a program on a pseudo-terminal and plays a script: [[text to wait for, keys to send], ...].

Arguments: the script as JSON, then the program and its arguments. Each text is looked for behind the one before.
Exits with the program's status; 1, with what was seen, when a text does not come within 20 s.
"""
import json
import os
import pty
import select
import sys
import termios
import time

script = json.loads(sys.argv[1])
pid, fd = pty.fork()
if pid == 0:
    os.execv(sys.argv[2], sys.argv[2:])
seen = b""
at = 0


def more(limit):
    global seen
    if not select.select([fd], [], [], limit)[0]:
        return True
    try:
        data = os.read(fd, 4096)
    except OSError:
        return False
    seen += data
    return len(data) > 0


for text, keys in script:
    end = time.monotonic() + 20
    while seen.find(text.encode(), at) < 0:
        if time.monotonic() > end or not more(0.2):
            print(f"waited for {text!r}; seen: {seen!r}")
            os.kill(pid, 9)
            sys.exit(1)
    at = seen.find(text.encode(), at) + len(text.encode())
    # A prompt is shown a moment before the editor takes the terminal over.
    while text == "> " and termios.tcgetattr(fd)[3] & termios.ICANON and time.monotonic() < end:
        time.sleep(0.005)
    if keys:
        os.write(fd, keys.encode())
end = time.monotonic() + 20
while more(0.2):
    if time.monotonic() > end:
        print(f"does not end; seen: {seen!r}")
        os.kill(pid, 9)
        sys.exit(1)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
sys.exit(status if status >= 0 else 128 - status)

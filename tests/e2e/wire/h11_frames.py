"""How h11 frames requests. Arguments: a file of records (4 bytes length, little endian, then the bytes) and a file for the
answers: one line a record, "METHOD:BODY_BYTES ..." of each whole request, then "." or "!" where h11 refused. Exit 77: no h11."""
import struct
import sys

try:
    import h11
except ImportError:
    print("python3-h11 is not installed")
    sys.exit(77)


def frames(data):
    out = []
    while data:  # no bytes would mean the end of the connection
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(data)
        method, size = None, 0
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError:
                return out + ["!"]
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return out + ["."]
            if isinstance(event, h11.Request):
                method = event.method.decode("latin-1")
            elif isinstance(event, h11.Data):
                size += len(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
        out.append("%s:%d" % (method, size))
        if connection.their_state not in (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL):
            return out + ["."]
        data = connection.trailing_data[0]
    return out + ["."]


with open(sys.argv[1], "rb") as records, open(sys.argv[2], "w") as answers:
    while header := records.read(4):
        answers.write(" ".join(frames(records.read(struct.unpack("<I", header)[0]))) + "\n")

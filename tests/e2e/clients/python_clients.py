"""W66 requests and httpx. Arguments: URL of the server, URL of one with the generated model."""
import json
import sys

import httpx
import requests

base = sys.argv[1]
question = {"messages": [{"role": "user", "content": "What is the capital of Norway?"}], "temperature": 0}
answer = "The capital of Norway is Oslo."


def data_lines(lines):
    text = ""
    done = False
    for line in lines:
        line = line.rstrip("\n")  # httpx 0.23 keeps it
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            done = True
            continue
        for choice in json.loads(line[6:])["choices"]:
            text += choice.get("delta", {}).get("content") or ""
    assert done, "no [DONE]"
    return text


def pieces(data):
    for i in range(0, len(data), 7):
        yield data[i : i + 7]


session = requests.Session()
r = session.post(base + "/v1/chat/completions", json=question, timeout=60)
assert r.status_code == 200 and r.json()["choices"][0]["message"]["content"] == answer, r.text
r = session.post(base + "/v1/chat/completions", json={**question, "stream": True}, stream=True, timeout=60)
r.encoding = "utf-8"
assert data_lines(r.iter_lines(decode_unicode=True)) == answer
r = session.post(
    base + "/v1/chat/completions",
    data=pieces(json.dumps(question).encode()),
    headers={"Content-Type": "application/json"},
    timeout=60,
)
assert r.status_code == 200 and r.json()["choices"][0]["message"]["content"] == answer, r.text
assert session.get(base + "/v1/models", timeout=60).json()["object"] == "list"

with httpx.Client(timeout=60) as client:
    r = client.post(base + "/v1/chat/completions", json=question)
    assert r.json()["choices"][0]["message"]["content"] == answer
    with client.stream("POST", base + "/v1/chat/completions", json={**question, "stream": True}) as r:
        assert data_lines(r.iter_lines()) == answer
    r = client.post(
        base + "/v1/chat/completions",
        content=pieces(json.dumps(question).encode()),
        headers={"Content-Type": "application/json"},
    )
    assert r.json()["choices"][0]["message"]["content"] == answer
    assert client.get(base + "/v1/models").json()["object"] == "list"
    r = client.get(base + "/nothing")
    assert r.status_code == 404 and r.json()["error"]["code"] == "unknown_url"

r = session.get(base + "/nothing", timeout=60)
assert r.status_code == 404 and r.json()["error"]["code"] == "unknown_url"

# A reader that leaves after its first event: the work ends.
long = {"messages": question["messages"], "ignore_eos": True, "max_tokens": 1900, "stream": True}
with requests.post(base + "/v1/chat/completions", json=long, stream=True, timeout=60) as r:
    next(r.iter_lines())
with httpx.stream("POST", base + "/v1/chat/completions", json=long, timeout=60) as r:
    next(r.iter_lines())

if len(sys.argv) > 2:  # row 17: characters that Python takes for line ends
    body = {"prompt": "#", "temperature": 0, "max_tokens": 32, "stream": True}
    r = session.post(sys.argv[2] + "/v1/completions", json=body, stream=True, timeout=60)
    r.encoding = "utf-8"
    text = ""
    for line in r.iter_lines(decode_unicode=True):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["text"]
        else:
            assert line in ("", ":", "data: [DONE]"), repr(line)
    print(json.dumps(text))

"""An external agent that is killed: `python asking_program.py QUESTION`; asks three times, with an id of its own in its
first message, and appends each reply that it gets to the file `ASKING_LOG`."""

import json
import os
import sys
import time
import urllib.request
import uuid


def ask(messages: list[dict[str, str]]) -> dict[str, str]:
    body = {"model": "solver", "messages": messages, "max_tokens": 8, "user": str(time.time())}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        reply = json.load(response)
    message: dict[str, str] = reply["choices"][0]["message"]
    log = os.open(os.environ["ASKING_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(log, (json.dumps([reply["id"], message["content"]]) + "\n").encode())
    os.close(log)
    return message


def main() -> None:
    messages = [{"role": "user", "content": f"Request {uuid.uuid4()}: {sys.argv[1]}"}]
    for turn in range(3):
        messages.append(ask(messages))
        time.sleep(0.02)
        messages.append({"role": "user", "content": f"And {turn}?"})
    print(len(messages[-2]["content"] or ""))


if __name__ == "__main__":
    main()

"""Requests to a live server with one experiment, and what it says about its arms."""

K = 8


def ask(client, user, **fields):
    """Returns the slate of a user."""
    answer = client.post("/v1/recommend", json={"user": {"id": user}, "k": K, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(answer):
    """Returns the item ids of a slate."""
    return [item["item_id"] for item in answer["items"]]


def arms(client):
    """Returns the states of the arms by name."""
    (one,) = client.get("/v1/experiments").json()["experiments"]
    return {arm["name"]: arm for arm in one["arms"]}


def metric(client, name, **labels):
    """Returns the value of a counter of experiments."""
    listed = ",".join(f'{label}="{value}"' for label, value in labels.items())
    line = f"recserve_experiment_{name}_total{{{listed}}} "
    (found,) = [x for x in client.get("/metrics").text.splitlines() if x.startswith(line)]
    return float(found.removeprefix(line))

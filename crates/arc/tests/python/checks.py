"""What the scripts that drive a server share. Every check counts: the last line says how many there were, so that a script that
stops early is seen."""

checks = 0


def check(condition, what):
    global checks
    checks += 1
    if not condition:
        raise SystemExit(f"FAILED: {what}")


def refused(call, error, what, param=None):
    try:
        call()
    except error as e:
        check(e.body and e.body.get("message"), f"{what}: an error has a message")
        if param is not None:
            check(e.body.get("param") == param, f"{what}: param is {e.body.get('param')!r}, not {param!r}")
        return e
    raise SystemExit(f"FAILED: {what} was not refused")


def done():
    print(f"{checks} checks passed")

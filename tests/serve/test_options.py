"""Fields of a request as options of the engine."""

from slipstream.serve.options import engine_options
from slipstream.serve.schema import CompletionRequest
from slipstream.serve.settings import ServeSettings


def salt(tenant: str, text: str | None) -> str:
    return engine_options(CompletionRequest(prompt="x", cache_salt=text), ServeSettings(("m",)), tenant)["cache_salt"]


def test_the_salt_of_the_cache_is_short_and_one_s_own() -> None:
    asked = [(tenant, text) for tenant in ("", "alice") for text in (None, "a", "b", "a" * 100_000)]
    salts = [salt(*each) for each in asked]
    assert len(set(salts)) == len(asked) and salts == [salt(*each) for each in asked]
    assert max(map(len, salts)) < 100

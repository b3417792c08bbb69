"""Reading pool files: what is accepted, what is refused, and with which words."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrack.config.document import MAX_FILE_BYTES, parse_document
from hotrack.config.pool_file import load_pool_file, load_pool_text, pool_json_schema
from hotrack.core.errors import ConfigError

MINIMAL = "models:\n  a: {model: x}\n"
BOMB = "a: &a [" + "x," * 10 + "]\n" + "\n".join(
    f"b{i}: &b{i} [{','.join(['*' + ('a' if i == 0 else f'b{i - 1}')] * 10)}]" for i in range(8)
)  # fmt: skip


def test_a_whole_file() -> None:
    config = load_pool_text(
        """
macros: {ctx: 4096, size: "${ctx}"}
apiKeys: [k1]
healthCheckTimeout: 60
models:
  chat:
    model: smollm2
    engine: {max_model_len: "${size}", dtype: bfloat16, kv_cache_memory: 64MiB}
    aliases: [gpt]
    ttl: 30
    pinned: true
  code:
    macros: {ctx: 1}
    cmd: |
      # a comment with ${nothing} in it
      server --port ${PORT}
        --ctx ${ctx} --name ${MODEL_ID}
    env: ["A=b=c"]
pool:
  memory: {budget: 900MiB, margin: 16MiB}
  sleep: {drain_timeout: 2m, level: 1}
  policy: {max_wait: 500ms, max_queue: 8}
  canary: {prompts: [hello], max_tokens: 2}
"""
    )
    chat, code = config.models["chat"], config.models["code"]
    assert chat.engine.max_model_len == 4096
    assert chat.engine.kv_cache_memory_bytes == 64 << 20
    assert (chat.aliases, chat.ttl_s, chat.pinned) == (("gpt",), 30, True)
    assert code.cmd == "server --port ${PORT}\n  --ctx 1 --name code"
    assert config.pool.memory.budget_bytes == 900 << 20
    assert config.pool.sleep.drain_s == 120
    assert config.pool.policy.max_wait_s == 0.5
    assert config.pool.canary.prompts == ("hello",)
    assert (config.api_keys, config.health_check_timeout_s, config.warnings) == (("k1",), 60, ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models:\n  a:\n    model_: x\n", "pool.yaml:3: models.a.model_: unknown key; did you mean 'model'"),
        ("models: {a: {model: x}}\nzzz: 1\n", "pool.yaml:2: zzz: unknown key; known keys: "),
        ("models:\n  a: {model: x}\n  a: {model: y}\n", "pool.yaml:3: models.a: written twice"),
        (
            "models:\n a: {model: x}\n b: {model: y, aliases: [a]}",
            "the name 'a' already belongs to model 'a'",
        ),
        (
            "models:\n a: {model: x, aliases: [c]}\n b: {model: y, aliases: [c]}",
            "already belongs to model 'a'",
        ),
        ("models: {}", "at least one model"),
        ("models: [a]", "must be a mapping of model ids"),
        ("- 1", "is a mapping with at least 'models:'"),
        ("", "is a mapping with at least 'models:'"),
        ("models: {a: 5}", "models.a: must be a mapping, got 5"),
        ("models: {a: {}}", "needs 'model'"),
        ("models: {a: {model: x, cmd: y}}", "not both"),
        ("models: {a: {proxy: 'ftp://x'}}", "must be an http URL"),
        ("models: {a: {cmd: x, env: [AB]}}", "models.a.env.0: must be NAME=value"),
        ("models: {a: {model: x, engine: {dtype: int3}}}", "must be one of 'auto'"),
        ("models: {a: {model: x, engine: {max_num_seqs: 0}}}", "must be at least 1, got 0"),
        ("models: {a: {model: x, engine: {max_num_seqs: many}}}", "must be an integer"),
        ("models: {a: {model: x, pinned: 1}}", "must be true or false"),
        ("models: {a: {model: [x]}}", "must be a string"),
        ("models: {a: {model: x, aliases: b}}", "must be a list"),
        (
            MINIMAL + "pool:\n  memory:\n    budget: 12 parsecs\n",
            "pool.yaml:5: pool.memory.budget: '12 parsecs'",
        ),
        (MINIMAL + "pool: {sleep: {drain_timeout: soon}}", "is not a duration"),
        (MINIMAL + "apiKeys: ['']", "a key must not be empty"),
        (MINIMAL + "hooks: {on_startup: {preload: [b]}}", "unknown model 'b'"),
        ("models: {a: {model: '${nope}'}}", "unknown macro ${nope}"),
        ("models: {a: {model: '${env.HOTRACK_SURELY_UNSET}'}}", "HOTRACK_SURELY_UNSET is not set"),
        (MINIMAL + "macros: {PORT: 1}", "not a macro name"),
        (MINIMAL + "macros: {m: [1]}", "a macro must be a string"),
        ("macros: {a: '${b}', b: 1}\n" + MINIMAL, "unknown macro ${b}"),
        ("x: [", "not valid YAML"),
        ("a: *b", "undefined alias"),
        (BOMB, "values after expanding aliases"),
        ("[" * 200_000, "not valid YAML"),
        ("&a [*a]", "nested more than"),
        ("a: !!python/object/apply:os.system [ls]", "pool.yaml:1"),
        ("models: {a: !!python/name:os.system {model: x}}", "pool.yaml:1"),
        ("models: {a: {model: !!binary aGk=}}", "is not allowed"),
        ("? [a]\n: b", "a key must be a plain word"),
        ("models: {a: {model: " + "9" * 5000 + "}}", "not a valid value"),
        ("models: {'': {model: x}}", "1 to 256 printable characters"),
        ("models: {" + "a" * 300 + ": {model: x}}", "1 to 256 printable characters"),
    ],
)
def test_mistakes_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_pool_text(text)
    assert words in caught.value.message
    assert "pool.yaml" in caught.value.message


def test_macros_cannot_grow_without_bound() -> None:
    lines = ["macros:", f"  m0: {'x' * 100}"]
    lines += [f"  m{i}: '{f'${{m{i - 1}}}' * 10}'" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="longer than"):
        load_pool_text("\n".join(lines) + "\n" + MINIMAL)


@pytest.mark.parametrize(
    ("raw", "words"),
    [(b"\xff\xfe", "not UTF-8"), (b"#" * (MAX_FILE_BYTES + 1), "larger than"), (None, "cannot read")],
)
def test_unreadable_files(tmp_path: Path, raw: bytes | None, words: str) -> None:
    path = tmp_path / "p.yaml"
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(ConfigError, match=words):
        load_pool_file(path)


def test_merge_keys_fill_in_but_do_not_override() -> None:
    document = parse_document("base: &b {x: 1, y: 2}\nuse: {<<: *b, y: 3}\n", "d")
    assert document.value["use"] == {"x": 1, "y": 3}


def test_keys_without_effect_are_accepted_with_a_warning() -> None:
    config = load_pool_text(MINIMAL + "startPort: 9000\ngroups: {g: {members: [a]}}\n")
    assert [warning.split(":")[0] for warning in config.warnings] == ["startPort", "groups"]


def test_a_macro_alone_keeps_its_type_and_env_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTRACK_TEST_X", "v")
    config = load_pool_text(
        "macros: {t: 0.7}\nmodels: {a: {model: '${env.HOTRACK_TEST_X}', metadata: {t: '${t}', s: 'is ${t}'}}}"
    )
    assert config.models["a"].model == "v"
    assert config.models["a"].metadata == {"t": 0.7, "s": "is 0.7"}


def test_the_json_schema_is_closed_everywhere() -> None:
    def walk(schema: object) -> None:
        if isinstance(schema, dict):
            if "properties" in schema:
                assert schema["additionalProperties"] is False
            for value in schema.values():
                walk(value)

    schema = pool_json_schema()
    walk(schema)
    assert "models" in schema["properties"]
    assert "budget" in schema["properties"]["pool"]["properties"]["memory"]["properties"]


@given(st.text(max_size=200))
def test_random_text_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^pool\.yaml"):
        load_pool_text(text)  # no short random text is a pool file

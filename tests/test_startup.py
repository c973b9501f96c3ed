"""How many pages fit, and what is refused before anything is allocated."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
from isthmus.core.config import CacheSettings, Config, ModelSettings, SchedulerSettings
from isthmus.core.errors import ConfigError
from isthmus.core.platform import Buckets, LayerState, Manifest
from isthmus.core.platform_options import check_options, platform_options
from isthmus.core.specs import KV_FORMATS, StateSpec
from isthmus.core.startup import KV_DTYPES, check_weights, compute_dtype, fit_memory

MIB = 2**20
MODEL = SimpleNamespace(name="tiny", max_position=4096, state_layers=(LayerState(4, 64),) * 2)
PAGE = 2 * 2 * 4 * 64 * 16 * 2  # bytes of a page of 16 tokens in bf16: layers, K and V, heads, width, tokens


def manifest(**changes) -> Manifest:
    given = dict(
        name="acme", device="Acme", interface=1, compute_dtypes=("bf16", "f32"), kv_dtypes=("bf16",), formats=(),
        page_sizes=(16, 1), buckets=None, memory_total=2**34, memory_free=2**33, features=frozenset(), determinism="T2")
    return Manifest(**{**given, **changes})


def fit(free: int, platform: Manifest | None = None, **settings):
    names = {"kv_cache_memory": CacheSettings, "kv_cache_dtype": CacheSettings, "max_model_len": ModelSettings,
             "max_running_requests": SchedulerSettings}
    groups: dict[type, dict] = {}
    for name, value in settings.items():
        groups.setdefault(names[name], {})[name] = value
    config = Config(**{field: kind(**groups.get(kind, {})) for field, kind in
                       (("cache", CacheSettings), ("model", ModelSettings), ("scheduler", SchedulerSettings))})
    return fit_memory(config, platform or manifest(), MODEL, "bf16", 16, free)


def test_a_share_of_what_is_free():
    sizes, notes = fit(free=400 * MIB)
    assert sizes.pages == 100 * MIB // PAGE and sizes.state.page_bytes() == PAGE
    assert sizes.max_model_len == 4096 and not notes


def test_a_share_is_no_more_than_requests_can_fill_and_this_is_said():
    sizes, notes = fit(free=2**40, max_running_requests=2, max_model_len=100)
    assert sizes.pages == 2 * 7 + 1
    assert notes == ["K and V take 480.0 KiB, all that 2 requests can fill; --kv-cache-memory gives prefixes more"]


def test_memory_that_is_asked_for_is_given_with_room_for_prefixes():
    sizes, notes = fit(free=100 * MIB, kv_cache_memory="64MiB", max_running_requests=2, max_model_len=100)
    assert sizes.pages == 64 * MIB // PAGE and not notes
    assert fit(free=64 * MIB, kv_cache_memory="64MiB")[0].pages == 64 * MIB // PAGE, "all that is free"


def test_a_context_that_does_not_fit_is_cut_and_said_so():
    sizes, notes = fit(free=2**40, kv_cache_memory=f"{PAGE * 11}B")
    assert sizes.max_model_len == 160 and "160 tokens instead of 4096" in notes[0]


@pytest.mark.parametrize(("free", "settings", "message"), [
    (100 * MIB, {"kv_cache_memory": "200MiB"}, "--kv-cache-memory 200MiB: 100 MiB are free"),
    (21 * 2**30, {"kv_cache_memory": "100TB"}, "--kv-cache-memory 100TB: 21.00 GiB are free beside the weights"),
    (100 * MIB, {"kv_cache_memory": "1KiB"}, "--kv-cache-memory 1KiB: 1.0 KiB for K and V hold no more than 0 tokens"),
    (2**40, {"kv_cache_memory": f"{PAGE * 11}B", "max_model_len": 2000}, "--max-model-len 2000 needs 3.9 MiB"),
    (2**40, {"max_model_len": 5000}, "tiny was made for 4096 positions"),
    (2**40, {"kv_cache_memory": f"{PAGE * 11}B", "max_model_len": 2000},
     "--max-model-len 160 fits; --kv-cache-memory 4MiB is enough, 1024.00 GiB are free"),
    (PAGE * 11, {"kv_cache_memory": f"{PAGE * 11}B", "max_model_len": 2000}, "--max-model-len 160 fits$"),
    (2**30, {"kv_cache_memory": "1KiB"}, "1.00 GiB are free; --kv-cache-memory 1MiB is the least"),
    (0, {}, "0.0 KiB are free; a smaller model or quantization leaves more"),
])
def test_what_cannot_fit_is_refused_with_the_numbers(free, settings, message):
    with pytest.raises(ConfigError, match=message):
        fit(free, **settings)


def test_a_dtype_of_k_and_v_in_which_the_context_fits_is_named():
    several = manifest(kv_dtypes=("bf16", "f8_e4m3"))
    with pytest.raises(ConfigError, match="--max-model-len 160 fits; --kv-cache-dtype fp8_e4m3 makes it fit$"):
        fit(PAGE * 11, several, kv_cache_memory=f"{PAGE * 11}B", max_model_len=300)
    assert fit(PAGE * 11, several, kv_cache_memory=f"{PAGE * 11}B", max_model_len=300, kv_cache_dtype="fp8_e4m3")


@pytest.mark.parametrize("world, words", [(1, "its weights need 9.00 GiB, and 8.00 GiB of 16.00 GiB are free on Acme"),
                                          (2, None)])
def test_weights_that_do_not_fit_are_refused_with_the_ways_out(world, words):
    if words is None:
        check_weights("tiny", 9 * 2**30, manifest(), world)
        return
    with pytest.raises(ConfigError, match=f"tiny does not fit: {words}.*--tensor-parallel-size 2 shares"):
        check_weights("tiny", 9 * 2**30, manifest(), world)


@pytest.mark.parametrize("dtype, width, vector", [("f64", 8, 0), ("f32", 4, 0), ("bf16", 2, 0), ("f16", 2, 0),
                                                  ("f8_e4m3", 1, 0), ("f8_e5m2", 1, 0), ("i8", 1, 4)])
def test_bytes_of_a_page_by_the_dtype_of_k_and_v(dtype, width, vector):
    """i8 has a float32 scale for each head's vector."""
    layers = (LayerState(4, 64), LayerState(2, 128))
    values, vectors = 2 * 16 * (4 * 64 + 2 * 128), 2 * 16 * (4 + 2)
    assert StateSpec(layers, dtype, 16, 2).page_bytes() == values * width + vectors * vector
    assert set(KV_FORMATS) == set(KV_DTYPES.values())


def test_the_dtype_of_k_and_v_is_one_of_the_platforms():
    several = manifest(kv_dtypes=("bf16", "f32", "f8_e4m3", "i8"))
    for asked, got in (("auto", "bf16"), ("float32", "f32"), ("fp8_e4m3", "f8_e4m3"), ("int8", "i8")):
        sizes, _ = fit(400 * MIB, several, kv_cache_dtype=asked)
        assert sizes.state.dtype == got
    assert sizes.pages == 100 * MIB // (2 * 2 * 4 * (64 + 4) * 16)
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8_e5m2: acme keeps K and V in bf16, f32, f8_e4m3, i8"):
        fit(400 * MIB, several, kv_cache_dtype="fp8_e5m2")
    assert fit(400 * MIB, manifest(kv_dtypes=("f32", "i8")))[0].state.dtype == "f32", "bf16 is not kept"


def test_limits_keep_inside_the_buckets():
    sizes, _ = fit(2**40, manifest(buckets=Buckets((16, 256), (1, 8), (1, 256))))
    assert (sizes.max_running, sizes.chunk) == (8, 248)


def test_a_context_is_no_longer_than_the_largest_bucket_of_pages():
    small = manifest(buckets=Buckets((16, 256), (1, 8), (1, 16)))
    sizes, notes = fit(2**40, small)
    assert sizes.max_model_len == 256 and any("contexts of 256 tokens at most in pages of 16" in n for n in notes)
    with pytest.raises(ConfigError, match="--max-model-len 300: .* contexts of 256 tokens"):
        fit(2**40, small, max_model_len=300)


def test_dtype_and_options():
    assert compute_dtype(Config(), manifest()) == "bf16"
    assert compute_dtype(Config(model=ModelSettings(dtype="float32")), manifest()) == "f32"
    with pytest.raises(ConfigError, match="float32: acme computes in bfloat16"):
        compute_dtype(Config(model=ModelSettings(dtype="float32")), manifest(compute_dtypes=("bf16",)))
    assert platform_options(("threads=8", "a=b=c")) == {"threads": "8", "a": "b=c"}
    for pair in ("threads", "=x", " =x", "=", ""):
        with pytest.raises(ConfigError, match=f"--platform-option '{pair}' is not of the form key=value"):
            platform_options((pair,))


@pytest.mark.parametrize("name, pair, words", [
    ("cpu", "graphs=banana", "graphs=banana'?: the cpu platform has no option graphs; it has threads, kernels"),
    ("cpu", "threads=0", "'threads=0': a number from 1 to 1024 is needed"),
    ("cpu", "threads=1025", "a number from 1 to 1024"), ("cpu", "threads=many", "a number from 1 to 1024"),
    ("mlx", "memory_share=1.5", "a number from 0.0 to 1.0"), ("mlx", "memory_share=nan", "a number from 0.0 to 1.0"),
    ("cpu", "theads=2", "no option theads; did you mean threads"),
    ("reference", "threads=2", "the reference platform has no option threads; it has none"),
    ("cuda", "graphs=banana", "graphs=banana'?: one of background, first, second, off is needed"),
    ("auto", "=2", "is not of the form key=value"), ("not there", "=2", "is not of the form key=value")])
def test_an_option_that_the_platforms_file_does_not_have_is_refused_without_it(name, pair, words):
    with pytest.raises(ConfigError, match=words):
        check_options(name, (pair,))
    check_options("cpu", ("threads=2", "kernels=torch"))
    check_options("null", ("vocab=many",))  # what its file does not say, the platform does
    check_options("auto", ("anything=x",))

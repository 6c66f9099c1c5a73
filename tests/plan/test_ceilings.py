"""Rates by a GPU's name, between what was measured, and from a file."""

import json

import pytest

from lib.errors import UserError
from lib.hardware.facts import Facts
from lib.hardware.findings import as_record, fine
from lib.plan.ceilings import H200, interpolated, known_ceilings, read_ceilings


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("H200", "NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("a100", "NVIDIA A100-SXM4-80GB"),
        ("A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("L4", "NVIDIA L4"),
        ("T4", "Tesla T4"),
        ("V100", "Tesla V100-SXM2-32GB"),
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
    ],
)
def test_names(name, device):
    found = known_ceilings(name)
    assert found.device == device
    assert found.measured is (device == "NVIDIA H200")


@pytest.mark.parametrize(
    "name", ["NVIDIA H2000", "NVIDIA GeForce RTX 4090 Laptop GPU", "MI300X", "0"]
)
def test_other_gpus_are_refused_with_the_names_there_are(name):
    with pytest.raises(UserError, match="NVIDIA H200"):
        known_ceilings(name)


@pytest.mark.parametrize(
    ("name", "product", "copy"), [("A100", 312, 2039), ("H100 PCIe", 756, 2000), ("T4", 65, 320)]
)
def test_estimates_follow_the_datasheet(name, product, copy):
    found = known_ceilings(name)
    assert found.product_tflops / H200.product_tflops == pytest.approx(product / 989)
    assert found.attention(128, 2048) / H200.attention(128, 2048) == pytest.approx(product / 989)
    assert found.copy_gb_per_s / H200.copy_gb_per_s == pytest.approx(copy / 4800)


def test_every_gpu_that_is_named_in_a_refusal_is_known():
    with pytest.raises(UserError) as refusal:
        known_ceilings("Z9")
    names = str(refusal.value).partition("there are ")[2].partition(";")[0].split(", ")
    assert len(names) > 10
    assert [known_ceilings(name).device for name in names] == names


def test_between_two_rates_and_beyond():
    rates = {16: 100.0, 64: 200.0}
    assert [interpolated(rates, at) for at in (1, 16, 32, 64, 999)] == [100, 100, 150, 200, 200]


def test_the_nearest_head_dimension():
    assert H200.attention(96, 2048) == H200.attention(128, 2048)
    assert H200.attention(32, 2048) == H200.attention(64, 2048)


def test_a_file_of_rates(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(H200.model_dump_json())
    assert read_ceilings(path) == H200


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"product_tflops": -1}, "product_tflops"),
        ({"speed": 1}, "speed"),
        ({"attention_tflops": {}}, "attention_tflops"),
        ({"attention_tflops": {"64": {}}}, "attention_tflops"),
        ({"attention_tflops": {"0": {"64": 1.0}}}, "attention_tflops"),
        ({"attention_tflops": {"64": {"0": 1.0}}}, "attention_tflops"),
        ({"attention_tflops": {"64": {"64": 0.0}}}, "attention_tflops"),
        ({"copy_gb_per_s": float("inf")}, "copy_gb_per_s"),
        ({"memory_gib": float("nan")}, "memory_gib"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_a_line(tmp_path, change, word):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(H200.model_dump(mode="json") | change))
    with pytest.raises(UserError, match=word):
        read_ceilings(path)


@pytest.mark.parametrize("text", ["", "[", "[1]"])
def test_a_file_that_is_none_is_refused_in_a_line(tmp_path, text):
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"rates\.json"):
        read_ceilings(path)
    with pytest.raises(UserError, match="missing"):
        read_ceilings(tmp_path / "missing")


OF_H200 = {
    "product_tflops": 792.0,
    "copy_gb_per_s": 4200.0,
    "attention_tflops": 277.0,
    "link_gb_per_s": 296.0,
    "latency_us": 39.0,
}


def record(tmp_path, figures, name="NVIDIA H200", gpus=2):
    """As ``stages.check_hardware`` writes it."""
    path = tmp_path / "hardware.json"
    found = as_record([fine("all", "", "cuda", **figures)], Facts(gpus=(name,) * gpus))
    path.write_text(json.dumps(found))
    return path


def test_the_record_of_an_h200_gives_its_known_rates(tmp_path):
    assert read_ceilings(record(tmp_path, OF_H200)) == H200


@pytest.mark.parametrize("figure", OF_H200)
def test_each_figure_of_a_record_counts_beside_that_of_an_h200(tmp_path, figure):
    found = read_ceilings(record(tmp_path, OF_H200 | {figure: OF_H200[figure] / 2}))
    links, delays = found.link_gb_per_s, found.latency_us
    shares = {
        "product_tflops": [found.product_tflops / H200.product_tflops],
        "copy_gb_per_s": [found.copy_gb_per_s / H200.copy_gb_per_s],
        "attention_tflops": [
            found.attention(size, length) / H200.attention(size, length)
            for size, length in ((64, 1024), (128, 8192))
        ],
        "link_gb_per_s": [
            links.collective[64] / H200.link_gb_per_s.collective[64],
            links.p2p[16] / H200.link_gb_per_s.p2p[16],
        ],
        "latency_us": [delays.collective / H200.latency_us.collective],
    }
    for name, seen in shares.items():
        assert seen == pytest.approx([0.5 if name == figure else 1.0] * len(seen))
    assert links.nodes == H200.link_gb_per_s.nodes
    assert delays.kernel == H200.latency_us.kernel


def test_what_a_record_lacks_is_as_of_the_known_gpu(tmp_path):
    name = "NVIDIA A100-SXM4-80GB"
    found = read_ceilings(record(tmp_path, {"product_tflops": 250.0}, name))
    known = known_ceilings(name)
    assert found.product_tflops == pytest.approx(H200.product_tflops * 250 / 792)
    assert found == known.model_copy(update={"product_tflops": found.product_tflops})
    assert found.measured is False
    assert read_ceilings(record(tmp_path, OF_H200, name)).measured is True


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"name": "Z9"}, "Z9"),
        ({"gpus": 0}, "is of a CPU"),
        ({"figures": {"copy_gb_per_s": -1}}, "copy_gb_per_s"),
    ],
)
def test_a_record_that_does_not_serve_is_refused_in_a_line(tmp_path, changes, word):
    with pytest.raises(UserError, match=rf"hardware\.json: .*{word}"):
        read_ceilings(record(tmp_path, **({"figures": OF_H200} | changes)))

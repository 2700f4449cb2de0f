"""Configs: layers merge, every preset loads and round-trips, every mistake is one message that says what to write."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from envs.libero import LiberoConfig
from envs.reach import ReachConfig
from learners.pretrain import PretrainConfig
from wamrl_ray.collect_expert import CollectConfig
from wamrl_ray.config import Config, ConfigError, from_json, load_config, to_json
from wamrl_ray.config_files import load_tree, shipped_presets


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def message(files: list[Path | str], overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides)
    return str(caught.value)


def test_no_file_and_no_override_is_the_defaults() -> None:
    assert load_config() == Config()


def test_a_later_file_wins_and_leaves_the_rest_alone(tmp_path: Path) -> None:
    first = write(tmp_path, "a.yaml", "seed: 1\nrollout: {num_workers: 3, group_size: 2}\n")
    second = write(tmp_path, "b.yaml", "rollout: {num_workers: 5}\n")
    config = load_config([first, second])
    assert (config.seed, config.rollout.num_workers, config.rollout.group_size) == (1, 5, 2)


def test_an_override_wins_over_files_whatever_its_spelling(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "seed: 1\n")
    config = load_config([file], ["--seed", "3", "--actor-learner.lr", "1e-4", "--video_learner.kl-weight=2"])
    assert (config.seed, config.actor_learner.lr, config.video_learner.kl_weight) == (3, 1e-4, 2.0)


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "actor_learner: {lr: 1e-3}\nvideo_learner: {lr: 1}\n")
    config = load_config([file])
    assert config.actor_learner.lr == 0.001
    assert type(config.video_learner.lr) is float


def test_lists_and_null_can_be_overridden() -> None:
    config = load_config([], ["--env.tasks", "[0, 3]", "--env.max-steps", "120"])
    assert isinstance(config.env, LiberoConfig)
    assert (config.env.tasks, config.env.max_steps) == ((0, 3), 120)
    assert load_config([], ["--env.max-steps", "null"]) == Config()


def test_another_kind_replaces_the_whole_section(tmp_path: Path) -> None:
    libero = write(tmp_path, "a.yaml", "env: {suite: libero_goal, resolution: 64}\n")
    reach = write(tmp_path, "b.yaml", "env: {kind: reach}\n")
    assert load_config([libero, reach]).env == ReachConfig()
    same = write(tmp_path, "c.yaml", "env: {kind: libero, settle_steps: 3}\n")
    assert load_config([libero, same]).env == LiberoConfig(suite="libero_goal", resolution=64, settle_steps=3)
    assert load_config([reach], ["--env.kind", "libero"]).env == LiberoConfig()


@pytest.mark.parametrize("name", [name for name in shipped_presets() if name.startswith("pretrain/")])
def test_every_pretraining_preset_loads(name: str) -> None:
    assert load_tree(PretrainConfig, [name], []).total_steps > 0


@pytest.mark.parametrize("name", [name for name in shipped_presets() if name.startswith("collect/")])
def test_every_collection_preset_loads(name: str) -> None:
    assert load_tree(CollectConfig, [name], []) != CollectConfig()


@pytest.mark.parametrize("name", [n for n in shipped_presets() if not n.startswith(("pretrain/", "collect/"))])
def test_every_preset_loads_is_short_and_round_trips(name: str) -> None:
    config = load_config([name])
    assert (config == Config()) == (name == "learners/wam_rl"), "the paper's preset is the default, written out"
    assert from_json(to_json(config)) == config
    assert len((Path("configs") / f"{name}.yaml").read_text(encoding="utf-8").splitlines()) <= 40


def test_the_json_keeps_every_bit_of_a_float_and_every_tuple() -> None:
    third = 0.1 + 0.2
    config = load_config([], ["--actor-learner.lr", repr(third), "--env.tasks", "[1, 2]"])
    back = from_json(to_json(config))
    assert back == config
    assert back.actor_learner.lr == third
    assert isinstance(back.env, LiberoConfig) and back.env.tasks == (1, 2)


def test_the_learner_presets_change_only_their_learner() -> None:
    plain, grpo = load_config(["debug"]), load_config(["debug", "learners/grpo"])
    assert grpo.actor_learner.advantage.kind == "group"
    assert dataclasses.replace(grpo, actor_learner=plain.actor_learner) == plain
    frozen = load_config(["debug", "learners/actor_only"])
    assert frozen.video_learner.lr == 0
    assert dataclasses.replace(frozen, video_learner=plain.video_learner) == plain


def test_an_unknown_key_names_file_key_and_the_nearest_valid_one(tmp_path: Path) -> None:
    file = write(tmp_path, "mine.yaml", "rollout: {num_worker: 3}\n")
    assert message([file], []) == f"{file}: unknown key rollout.num_worker; did you mean rollout.num_workers?"
    assert "did you mean video_learner.lr or actor_learner.lr?" in message([], ["--lr", "1"])
    assert "valid keys are seed, iterations" in message([], ["--frobnicate", "1"])


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("--actor-learner.lr=abc", ["actor_learner.lr = 'abc'", "valid number"]),
        ("--actor-learner.lr=nan", ["actor_learner.lr", "use a finite number"]),
        ("--actor-learner.objective.clip-low=2", ["actor_learner.objective.clip_low = 2.0", "between 0 and 1"]),
        ("--actor-learner.objective.kind=pp", ["actor_learner.objective.kind = 'pp'", "ppo, awr", "'ppo'"]),
        ("--actor-learner.objective.draws=2", ["actor_learner.objective.draws; it belongs to kind awr, set"]),
        ("--actor-learner.objective=awr", ["actor_learner.objective = 'awr'", "(actor_learner.objective.kind)"]),
        ("--actor-learner.entropy-bonus=0.1", ["actor_learner.entropy_bonus = 0.1", "flow_noise"]),
        ("--sampler.eta=0", ["sampler.eta = 0", "no density"]),
        ("--seed=1.5", ["seed = '1.5'", "valid integer"]),
        ("--rollout.num-workers=0", ["rollout.num_workers = 0", "at least 1"]),
        ("--rollout.group-size=3", ["rollout.group_size = 3", "divisor", "16"]),
        ("--video-learner.probe-versions=3", ["video_learner.probe_versions = 3", "at least 4"]),
        ("--reward.shaping=progres", ["reward.shaping", "did you mean 'progress'"]),
        ("--env.kind=libro", ["env.kind = 'libro'", "use one of libero, ", "did you mean 'libero'"]),
        ("--env.resolution=4", ["env.resolution = 4", "at least 16"]),
        ("--rollout=3", ["rollout = '3'", "is a section"]),
        ("--device=tpu", ["device = 'tpu'", "'auto', 'cpu' or 'cuda'"]),
    ],
)
def test_a_wrong_value_names_source_key_value_and_remedy(override: str, parts: list[str]) -> None:
    text = message([], [override])
    assert text.startswith("command line: ")
    assert all(part in text for part in parts), text


def test_groups_of_one_are_refused_where_the_advantage_compares_a_group() -> None:
    assert "rollout.group_size = 1: an episode alone" in message(["learners/grpo"], ["--rollout.group-size=1"])
    assert load_config([], ["--rollout.group-size=1"]).rollout.group_size == 1


def test_the_message_names_the_file_that_set_the_value_last(tmp_path: Path) -> None:
    good = write(tmp_path, "good.yaml", "checkpoint: {keep: 2}\n")
    bad = write(tmp_path, "bad.yaml", "checkpoint: {keep: 0}\n")
    assert message([good, bad], []) == f"{bad}: checkpoint.keep = 0: use at least 1"


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n"])
def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, "broken.yaml", text)
    assert message([file], []).startswith(f"{file}: ")


def test_a_missing_file_lists_the_presets() -> None:
    assert "shipped presets are collect/tiny_libero_object, " in message(["nope.yaml"], [])


def test_an_override_without_value_or_dashes_is_refused() -> None:
    assert "--seed needs a value" in message([], ["--seed"])
    assert "--seed needs a value" in message([], ["--seed", "--iterations", "3"])
    assert "'seed' is not an option" in message([], ["seed", "3"])


@pytest.mark.parametrize("text", ["actor_learner: {lr: .inf}", "actor_learner: {lr: .nan}", "iterations: true"])
def test_numbers_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"odd\.yaml: \S+ = \S+: use a (finite )?number"):
        load_config([tmp_path / "odd.yaml"], [])

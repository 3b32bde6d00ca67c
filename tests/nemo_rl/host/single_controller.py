"""NeMo-RL's real ``setup_single_controller``, with what it starts replaced; says which loss the actor would get."""

import argparse
import pickle
import types
from unittest import mock

import fakes
from nemo_rl.algorithms.single_controller_utils import MasterConfig, setup
from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
from omegaconf import OmegaConf

register_omegaconf_resolvers()
parser = argparse.ArgumentParser()
parser.add_argument("--config")
arguments, overrides = parser.parse_known_args()
config = parse_hydra_overrides(load_config(arguments.config), overrides)
config = MasterConfig(**OmegaConf.to_container(config, resolve=True))

checkpoints = mock.Mock()
checkpoints.return_value.get_latest_checkpoint_path.return_value = None
checkpoints.return_value.load_training_info.return_value = None
checkpoints.return_value.get_resume_paths.return_value = (None, None)
started = {
    "CheckpointManager": checkpoints,
    "setup_response_data": lambda *args, **kwargs: ([{}] * 64, None, {}, {}),
    "_build_clusters": lambda *args, **kwargs: (fakes.Cluster(), fakes.Cluster()),
    "_build_generation": lambda *args, **kwargs: (mock.Mock(), 0.0),
    "_build_trainer": lambda *args, **kwargs: (mock.Mock(), 0.0),
    "_maybe_attach_fleet_health": mock.Mock(),
    "build_data_plane_client": mock.Mock(),
    "create_weight_synchronizer": mock.Mock(),
    "TQReplayBuffer": mock.Mock(),
    "RolloutManager": mock.Mock(),
}
with mock.patch.multiple(setup, **started):
    actor_arguments, _ = setup.setup_single_controller(config, types.SimpleNamespace(pad_token_id=0))
loss = pickle.loads(pickle.dumps(actor_arguments.loss_fn))
fakes.record("train", loss_class=f"{type(loss).__module__}.{type(loss).__name__}", name=loss.config.name)

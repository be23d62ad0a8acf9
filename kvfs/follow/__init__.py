"""Other hosts' journals into this host's index: following, checkpoints, what may be removed."""

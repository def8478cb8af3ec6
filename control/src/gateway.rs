//! `vipgate gateway`: puts the parts together, starts the workers, follows policy and network until it is told to stop.

pub mod state;

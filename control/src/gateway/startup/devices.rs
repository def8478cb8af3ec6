//! Startup of interfaces, AF_XDP sockets and the steering program.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::io::frame_layout::FrameLayout;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::spec::Role;
use vipgate_xdp::attach::{self, Mode, ModePreference, OnExit};
use vipgate_xdp::device::XdpDevice;
use vipgate_xdp::guard;
use vipgate_xdp::multicast::AllMulticast;
use vipgate_xdp::nic::Nic;
use vipgate_xdp::open::{self, DeviceConfig, ZeroCopy};
use vipgate_xdp::steering::{Steering, SteeringError};

use crate::command_error::CommandError;
use crate::config::{self, Config};
use crate::gateway::interface_lock::InterfaceLocks;
use crate::gateway::steering_tables;
use crate::gateway::tracking::{AttachedInterface, Tracking, TrackingConfig};
use crate::kernel::Network;
use crate::state::SocketStatus;

/// The interfaces and their steering program: loaded, then attached.
pub(super) struct SteeredInterfaces {
    pub(super) nics: Vec<Nic>,
    pub(super) steering: Arc<Mutex<Steering>>,
    /// XDP mode of each interface; empty: the program isn't attached, and nothing is captured.
    pub(super) modes: Vec<Mode>,
    /// Whether each interface has the tc guard.
    guards: Vec<bool>,
    /// From before the first socket is opened, so that `vipgate detach` removes nothing that is in use.
    pub(super) locks: InterfaceLocks,
    /// All-multicast memberships of the outside interfaces.
    pub(super) multicast: Vec<AllMulticast>,
}

impl SteeredInterfaces {
    /// Opens the sockets of all workers and loads the steering program; nothing is captured yet.
    pub(super) fn open(
        config: &Config,
        nics: Vec<Nic>,
        workers: usize,
        frames: FrameLayout,
    ) -> Result<(Self, Vec<XdpDevice>), CommandError> {
        let locks = InterfaceLocks::acquire(&nics)?;
        let (steering, devices) = open_devices(config, &nics, workers, frames)?;
        let (steering, multicast) = (Arc::new(Mutex::new(steering)), join_multicast(config, &nics));
        Ok((Self { nics, steering, modes: Vec::new(), guards: Vec::new(), locks, multicast }, devices))
    }

    fn steering(&self) -> MutexGuard<'_, Steering> {
        self.steering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Programs the steering tables for a policy.
    pub(super) fn program(
        &self,
        policy: &Policy,
        locals: &[IpAddr],
        tunnels: &[SocketAddr],
    ) -> Result<(), SteeringError> {
        self.steering().apply(&steering_tables::for_policy(policy, locals, tunnels))
    }

    /// Closed: everything is captured. Open: what policy covers; the rest passes to the kernel.
    pub(super) fn set_closed(&self, closed: bool) -> Result<(), CommandError> {
        self.steering().set_closed(closed).map_err(CommandError::runtime)
    }

    /// Attaches the steering program, if it isn't attached yet: from here on, packets are captured.
    pub(super) fn attach(&mut self, config: &Config) -> Result<(), CommandError> {
        if self.modes.is_empty() {
            let (modes, guards) = attach_steering(config, &self.nics, &mut self.steering())?;
            (self.modes, self.guards) = (modes, guards);
        }
        Ok(())
    }

    /// Starts to track interfaces, next hops and the steering program.
    pub(super) fn track(&self, config: &Config, network: &Network) -> Tracking {
        let attached = self.nics.iter().zip(&self.modes).zip(&self.guards);
        let interfaces = attached.map(|((nic, mode), has_guard)| AttachedInterface {
            nic: nic.clone(),
            mode: *mode,
            has_guard: *has_guard,
        });
        Tracking::new(TrackingConfig {
            network,
            interfaces: interfaces.collect(),
            on_exit: on_exit(config),
            // By default, there are as many workers as queues.
            min_queues: config.workers.cores.as_ref().map_or(1, Vec::len),
            steering: self.steering.clone(),
            health: config.health.clone(),
        })
    }
}

/// Loads the steering program and adds the sockets of all workers to its XSKMAP.
fn open_devices(
    config: &Config,
    nics: &[Nic],
    workers: usize,
    frames: FrameLayout,
) -> Result<(Steering, Vec<XdpDevice>), CommandError> {
    let mut steering = Steering::load(frames).map_err(CommandError::runtime)?;
    let devices = open::open(&DeviceConfig {
        interfaces: nics.to_vec(),
        workers,
        frames,
        zero_copy: match config.xdp.zero_copy {
            config::ZeroCopy::Auto => ZeroCopy::Auto,
            config::ZeroCopy::Always => ZeroCopy::Always,
            config::ZeroCopy::Never => ZeroCopy::Never,
        },
        busy_poll: config.xdp.busy_poll,
        fill_ring: config.xdp.fill_ring,
    })
    .map_err(open_error)?;
    for ((nic, index), interface) in nics.iter().zip(0..).zip(&config.interfaces) {
        let is_inside = Role::from(interface.role).is_inside();
        steering.add_interface(nic.ifindex, InterfaceId(index), is_inside).map_err(CommandError::runtime)?;
    }
    for (interface, queue, fd, _) in devices.iter().flat_map(XdpDevice::sockets) {
        steering.set_socket(interface, queue, fd).map_err(CommandError::runtime)?;
    }
    Ok((steering, devices))
}

/// Attaches the steering program and the tc guard. Returns the mode of each interface, and whether it has the guard.
fn attach_steering(
    config: &Config,
    nics: &[Nic],
    steering: &mut Steering,
) -> Result<(Vec<Mode>, Vec<bool>), CommandError> {
    let mode = match config.xdp.mode {
        config::XdpMode::Auto => ModePreference::Auto,
        config::XdpMode::Native => ModePreference::Native,
        config::XdpMode::Generic => ModePreference::Generic,
    };
    let modes = attach::attach(steering, nics, mode, on_exit(config)).map_err(CommandError::runtime)?;
    Ok((modes, install_guard(config, nics, steering)))
}

/// What happens to captured traffic when the process ends.
pub(super) fn on_exit(config: &Config) -> OnExit {
    match config.xdp.on_exit {
        config::OnExit::Drop => OnExit::Drop,
        config::OnExit::Pass => OnExit::Pass,
    }
}

/// Installs the tc guard, which drops captured traffic if the XDP program is detached. Not with `on_exit: pass`, where
/// traffic must pass whenever the process ends; there a BPF link holds the steering program, which isn't detached by
/// accident. Returns whether each interface has it: a kernel without it is one on which the gateway runs, too.
fn install_guard(config: &Config, nics: &[Nic], steering: &mut Steering) -> Vec<bool> {
    let guards = nics.iter().map(|nic| {
        let outcome = match on_exit(config) {
            OnExit::Drop => guard::install(steering, nic).map(|()| true),
            OnExit::Pass => guard::remove(nic).map(|_| false),
        };
        outcome.unwrap_or_else(|error| {
            tracing::warn!(
                event = "guard",
                interface = nic.name,
                %error,
                "cannot install the tc guard: while the XDP program is detached, the kernel forwards its traffic"
            );
            false
        })
    });
    guards.collect()
}

/// A socket of a device: interface, queue, file descriptor, zero copy.
pub(super) type Socket = (InterfaceId, u32, i32, bool);

/// The status of the sockets of each worker, which it also logs.
pub(super) fn socket_status(nics: &[Nic], modes: &[Mode], sockets: Vec<Vec<Socket>>) -> Vec<SocketStatus> {
    let by_worker =
        sockets.into_iter().zip(0..).flat_map(|(sockets, worker)| sockets.into_iter().map(move |s| (worker, s)));
    let status = by_worker.map(|(worker, (interface, queue, _, zero_copy))| {
        let (interface, mode) = (nics[usize::from(interface.0)].name.clone(), modes[usize::from(interface.0)].name());
        tracing::info!(event = "socket", interface, queue, worker, mode, zero_copy, "AF_XDP socket opened");
        SocketStatus { interface, queue, worker, mode, zero_copy }
    });
    status.collect()
}

/// The configured interfaces in this network namespace.
pub(super) fn find_nics(config: &Config) -> Result<Vec<Nic>, CommandError> {
    let found: Result<Vec<_>, _> = config.interfaces.iter().map(|interface| Nic::find(&interface.name)).collect();
    found.map_err(CommandError::runtime)
}

/// The core of each worker: as configured, else one worker per queue.
pub(super) fn worker_cores(config: &Config, nics: &[Nic]) -> Result<Vec<usize>, CommandError> {
    let available: Vec<usize> = core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).collect();
    if let Some(cores) = &config.workers.cores {
        if let Some(missing) = cores.iter().find(|core| !available.contains(core)) {
            return Err(CommandError::usage(format!(
                "workers.cores: this machine has no core {missing} (it has {available:?})"
            )));
        }
        return Ok(cores.clone());
    }
    // With more queues than cores, a worker polls several queues.
    let queues = nics.iter().map(|nic| nic.queues as usize).min().unwrap_or(1);
    let cores: Vec<usize> = available.into_iter().take(queues.max(1)).collect();
    Ok(if cores.is_empty() { vec![0] } else { cores })
}

/// An error to open devices; a usage error where the configuration is wrong.
fn open_error(error: open::OpenError) -> CommandError {
    match error {
        open::OpenError::TooFewQueues { .. } => CommandError::usage(error).context("workers.cores"),
        open::OpenError::TooManyQueues { .. } => CommandError::usage(error).context("interfaces"),
        open::OpenError::Umem { .. } | open::OpenError::Socket { .. } | open::OpenError::MultiBuffer { .. } => {
            CommandError::runtime(error)
        }
    }
}

/// Enables all-multicast on the outside interfaces: neighbor solicitations for VIPs are multicast, which NICs filter by
/// default.
fn join_multicast(config: &Config, nics: &[Nic]) -> Vec<AllMulticast> {
    let outside =
        config.interfaces.iter().zip(nics).filter(|(interface, _)| interface.role != config::InterfaceRole::Inside);
    outside
        .filter_map(|(_, nic)| match AllMulticast::join(nic.ifindex) {
            Ok(membership) => Some(membership),
            Err(error) => {
                tracing::warn!(interface = nic.name, %error, "cannot enable all-multicast; NDP for VIPs may fail");
                None
            }
        })
        .collect()
}

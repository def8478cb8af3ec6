//! Startup of interfaces, AF_XDP sockets and the steering program.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::thread::{CpuSet, sched_getaffinity};
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
use crate::state::tracking::Attachment;

/// The interfaces and their steering program: loaded, then attached.
pub(super) struct SteeredInterfaces {
    pub(super) nics: Vec<Nic>,
    pub(super) steering: Arc<Mutex<Steering>>,
    /// XDP mode of each interface; empty: the program isn't attached, and nothing is captured.
    pub(super) modes: Vec<Mode>,
    /// The tc guard of each interface; `None`: it has none.
    guards: Vec<Option<Attachment>>,
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
        let outside = config.interfaces.iter().zip(&nics);
        let outside = outside.filter(|(interface, _)| interface.role != config::InterfaceRole::Inside);
        let multicast = join_multicast(outside.map(|(_, nic)| nic))?;
        let steering = Arc::new(Mutex::new(steering));
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
        let interfaces =
            attached.map(|((nic, mode), guard)| AttachedInterface { nic: nic.clone(), mode: *mode, guard: *guard });
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

/// Attaches the steering program and the tc guard. Returns the mode of each interface, and its guard.
fn attach_steering(
    config: &Config,
    nics: &[Nic],
    steering: &mut Steering,
) -> Result<(Vec<Mode>, Vec<Option<Attachment>>), CommandError> {
    let mode = match config.xdp.mode {
        config::XdpMode::Auto => ModePreference::Auto,
        config::XdpMode::Native => ModePreference::Native,
        config::XdpMode::Generic => ModePreference::Generic,
    };
    if on_exit(config) == OnExit::Drop {
        // Now: later, the control thread lacks the capabilities for it.
        guard::load(steering).map_err(|error| CommandError::runtime(error).context("cannot load the tc guard"))?;
    }
    let modes = attach::attach(steering, nics, mode, on_exit(config)).map_err(CommandError::runtime)?;
    let guards = nics.iter().map(|nic| install_guard(config, nic, steering)).collect::<Result<Vec<_>, _>>()?;
    Ok((modes, guards))
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
/// accident. Returns the state of the guard; `None`: the interface has none.
fn install_guard(config: &Config, nic: &Nic, steering: &mut Steering) -> Result<Option<Attachment>, CommandError> {
    match on_exit(config) {
        OnExit::Drop => Ok(guard_state(nic, guard::install(steering, nic))),
        OnExit::Pass => match guard::remove(nic) {
            Err(error) if !is_without_guards(&error) => Err(CommandError::runtime(error)
                .context(format_args!("interface {}: cannot remove the tc guard", nic.name))),
            Ok(_) | Err(_) => Ok(None),
        },
    }
}

/// The state of the guard by the outcome of its installation. A kernel without it is one on which the gateway runs, too;
/// after other errors, tracking installs it.
fn guard_state(nic: &Nic, outcome: io::Result<()>) -> Option<Attachment> {
    let Err(error) = outcome else { return Some(Attachment::Attached) };
    let state = (!is_without_guards(&error)).then_some(Attachment::Missing);
    tracing::warn!(
        event = "guard",
        interface = nic.name,
        %error,
        "cannot install the tc guard: while the XDP program is detached, the kernel forwards its traffic"
    );
    state
}

/// Whether the kernel has no traffic control, or neither `clsact` nor `cls_bpf`.
fn is_without_guards(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOENT))
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
    let available = sched_getaffinity(None)
        .map(|set| (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect())
        .map_err(io::Error::from);
    // With more queues than cores, a worker polls several queues.
    let queues = nics.iter().map(|nic| nic.queues as usize).min().unwrap_or(1);
    assign_cores(config.workers.cores.as_deref(), available, queues)
}

fn assign_cores(
    configured: Option<&[usize]>,
    available: io::Result<Vec<usize>>,
    queues: usize,
) -> Result<Vec<usize>, CommandError> {
    let available =
        available.map_err(|error| CommandError::runtime(error).context("cannot query the cores of this machine"))?;
    if let Some(cores) = configured {
        if let Some(missing) = cores.iter().find(|core| !available.contains(core)) {
            return Err(CommandError::usage(format!(
                "workers.cores: this machine has no core {missing} (it has {available:?})"
            )));
        }
        return Ok(cores.to_vec());
    }
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
fn join_multicast<'a>(outside: impl Iterator<Item = &'a Nic>) -> Result<Vec<AllMulticast>, CommandError> {
    let memberships = outside.map(|nic| {
        AllMulticast::join(nic.ifindex).map_err(|error| {
            CommandError::runtime(error).context(format_args!("interface {}: cannot enable all-multicast", nic.name))
        })
    });
    memberships.collect()
}

#[cfg(test)]
mod tests {
    use std::process::ExitCode;

    use super::*;

    fn gone() -> Nic {
        let ifindex = i32::MAX.cast_unsigned();
        Nic { name: "gone0".to_owned(), ifindex, queues: 1, native_xdp: false, zero_copy: false }
    }

    #[test]
    fn a_guard_that_could_not_be_installed_is_missing_unless_the_kernel_has_none() {
        assert_eq!(guard_state(&gone(), Ok(())), Some(Attachment::Attached));
        let state = |number| guard_state(&gone(), Err(io::Error::from_raw_os_error(number)));
        for number in [libc::ENOMEM, libc::ENOBUFS, libc::EMFILE, libc::EINVAL, libc::EPERM] {
            assert_eq!(state(number), Some(Attachment::Missing), "error {number}");
        }
        for number in [libc::EOPNOTSUPP, libc::ENOENT] {
            assert_eq!(state(number), None, "error {number}");
        }
    }

    #[test]
    fn cores_that_can_not_be_queried_are_no_wrong_configuration() {
        let cores = |configured: Option<&[usize]>, queues| assign_cores(configured, Ok(vec![0, 2]), queues).unwrap();
        assert_eq!((cores(Some(&[2]), 1), cores(None, 1), cores(None, 4)), (vec![2], vec![0], vec![0, 2]));
        let missing = assign_cores(Some(&[1]), Ok(vec![0, 2]), 1).unwrap_err();
        assert_eq!(missing.exit_code(), ExitCode::from(2), "{missing}");
        for configured in [None, Some(&[0_usize][..])] {
            let available = Err(io::Error::from_raw_os_error(libc::ENOMEM));
            let failed = assign_cores(configured, available, 1).unwrap_err();
            assert_eq!(failed.exit_code(), ExitCode::from(1), "{failed}");
        }
    }

    /// Without `CAP_NET_RAW`, it fails as well.
    #[test]
    fn a_start_without_all_multicast_fails() {
        let error = join_multicast([gone()].iter()).unwrap_err();
        assert!(error.to_string().starts_with("interface gone0: cannot enable all-multicast: "), "{error}");
        assert_eq!(error.exit_code(), ExitCode::from(1));
    }
}

//! The way up of what packets come through: interfaces, sockets, the steering program.

use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::spec::Role;
use vipgate_xdp::attach::{self, Mode, ModeWish, OnExit};
use vipgate_xdp::device::XdpDevice;
use vipgate_xdp::guard;
use vipgate_xdp::multicast::AllMulticast;
use vipgate_xdp::nic::Nic;
use vipgate_xdp::open::{self, Plan, ZeroCopy};
use vipgate_xdp::steering::Steering;

use crate::config::{self, Config};
use crate::failure::Failure;
use crate::gateway::state::SocketStatus;

/// Loads the steering program and connects it to the sockets of all workers; nothing is captured yet.
pub(super) fn open_devices(
    config: &Config,
    nics: &[Nic],
    workers: usize,
) -> Result<(Steering, Vec<XdpDevice>), Failure> {
    let mut steering = Steering::load().map_err(Failure::runtime)?;
    let devices = open::open(&Plan {
        interfaces: nics.to_vec(),
        workers,
        zero_copy: match config.xdp.zero_copy {
            config::ZeroCopy::Auto => ZeroCopy::Auto,
            config::ZeroCopy::Always => ZeroCopy::Always,
            config::ZeroCopy::Never => ZeroCopy::Never,
        },
        busy_poll: config.xdp.busy_poll,
        fill_ring: config.xdp.fill_ring,
    })
    .map_err(open_failure)?;
    for ((nic, number), interface) in nics.iter().zip(0..).zip(&config.interfaces) {
        let is_inside = Role::from(interface.role).is_inside();
        steering.add_interface(nic.ifindex, InterfaceId(number), is_inside).map_err(Failure::runtime)?;
    }
    for (interface, queue, fd, _) in devices.iter().flat_map(XdpDevice::sockets) {
        steering.connect(interface, queue, fd).map_err(Failure::runtime)?;
    }
    Ok((steering, devices))
}

/// Puts the steering program on the interfaces: from here on, packets are captured.
pub(super) fn attach_steering(config: &Config, nics: &[Nic], steering: &mut Steering) -> Result<Vec<Mode>, Failure> {
    let wish = match config.xdp.mode {
        config::XdpMode::Auto => ModeWish::Auto,
        config::XdpMode::Native => ModeWish::Native,
        config::XdpMode::Generic => ModeWish::Generic,
    };
    let modes = attach::attach(steering, nics, wish, on_exit(config)).map_err(Failure::runtime)?;
    install_guard(config, nics, steering);
    Ok(modes)
}

pub(super) fn on_exit(config: &Config) -> OnExit {
    match config.xdp.on_exit {
        config::OnExit::Drop => OnExit::Drop,
        config::OnExit::Pass => OnExit::Pass,
    }
}

/// Closes the kernel's own path for what is captured. With `on_exit: pass` it must open when the process ends, however that is; there
/// the steering program is held by a link, which nobody takes off by accident.
fn install_guard(config: &Config, nics: &[Nic], steering: &mut Steering) {
    for nic in nics {
        let outcome = match on_exit(config) {
            OnExit::Drop => guard::install(steering, nic),
            OnExit::Pass => guard::remove(nic).map(drop),
        };
        if let Err(error) = outcome {
            tracing::warn!(
                event = "guard",
                interface = nic.name,
                %error,
                "no second line behind the XDP program: were that taken off, the kernel would forward what it captures until it is back"
            );
        }
    }
}

/// Interface, queue, descriptor, zero copy: a socket as its device tells.
pub(super) type Socket = (InterfaceId, u32, i32, bool);

/// The sockets as the kernel granted them, by worker; the log says so, too.
pub(super) fn granted(nics: &[Nic], modes: &[Mode], sockets: Vec<Vec<Socket>>) -> Vec<SocketStatus> {
    let all = sockets.into_iter().zip(0..).flat_map(|(sockets, worker)| sockets.into_iter().map(move |s| (worker, s)));
    let status = all.map(|(worker, (interface, queue, _, zero_copy))| {
        let (interface, mode) = (nics[usize::from(interface.0)].name.clone(), modes[usize::from(interface.0)].name());
        tracing::info!(event = "socket", interface, queue, worker, mode, zero_copy, "AF_XDP socket granted");
        SocketStatus { interface, queue, worker, mode, zero_copy }
    });
    status.collect()
}

pub(super) fn find_nics(config: &Config) -> Result<Vec<Nic>, Failure> {
    let found: Result<Vec<_>, _> = config.interfaces.iter().map(|interface| Nic::find(&interface.name)).collect();
    found.map_err(Failure::runtime)
}

/// The core of each worker: as configured, or one for each queue that all interfaces have.
pub(super) fn cores(config: &Config, nics: &[Nic]) -> Result<Vec<usize>, Failure> {
    let available: Vec<usize> = core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).collect();
    if let Some(cores) = &config.workers.cores {
        if let Some(missing) = cores.iter().find(|core| !available.contains(core)) {
            return Err(Failure::usage(format_args!(
                "workers.cores: this machine has no core {missing} (it has {available:?})"
            )));
        }
        return Ok(cores.clone());
    }
    // With more queues than cores, a worker polls several.
    let queues = nics.iter().map(|nic| nic.queues as usize).min().unwrap_or(1);
    let cores: Vec<usize> = available.into_iter().take(queues.max(1)).collect();
    Ok(if cores.is_empty() { vec![0] } else { cores })
}

/// What is the configuration's fault is said as such.
pub(super) fn open_failure(error: open::OpenError) -> Failure {
    match error {
        open::OpenError::TooFewQueues { .. } => Failure::usage(format_args!("workers.cores: {error}")),
        open::OpenError::TooManyQueues { .. } => Failure::usage(format_args!("interfaces: {error}")),
        open::OpenError::Umem { .. } | open::OpenError::Socket { .. } => Failure::runtime(error),
    }
}

/// Neighbour solicitations for VIPs come by multicast, which NICs filter out unless somebody asks for it.
pub(super) fn join_multicast(config: &Config, nics: &[Nic]) -> Vec<AllMulticast> {
    let outside =
        config.interfaces.iter().zip(nics).filter(|(interface, _)| interface.role != config::InterfaceRole::Inside);
    outside
        .filter_map(|(_, nic)| match AllMulticast::join(nic.ifindex) {
            Ok(membership) => Some(membership),
            Err(error) => {
                tracing::warn!(interface = nic.name, %error, "cannot ask for multicast; IPv6 VIPs may not be found");
                None
            }
        })
        .collect()
}

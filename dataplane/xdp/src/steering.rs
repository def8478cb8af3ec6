//! The steering program and its BPF maps, which define the captured traffic. Loaded once for all interfaces; the maps
//! are filled before the program is attached, and updated incrementally on policy changes (`steering/update.rs`).

mod cluster_prefixes;
mod entries;
mod error;
mod maps;
mod tables;
mod update;

use std::os::fd::{AsFd, BorrowedFd};

use aya::maps::{Array, MapData, PerCpuArray, XskMap};
use aya::programs::{ProgramError, SchedClassifier, TestRun, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::io::frame_layout::FrameLayout;

use crate::guard::GUARD_NAME;
use crate::program::PROGRAM_NAME;
pub use crate::steering::error::SteeringError;
pub(crate) use crate::steering::error::{error_chain, raw_os_error};
use crate::steering::maps::{Maps, take_map};
pub use crate::steering::tables::{Listener, NO_POLICY, SteeringChange, SteeringTables};
use crate::steering::update::Applied;

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/steer.bpf.o"));
/// The same for packets in several buffers.
static MULTI_BUFFER_OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/steer_frags.bpf.o"));

/// Return code for packets that aren't captured (linux/bpf.h).
const XDP_PASS: u32 = 2;

/// Maximum number of queues per interface.
pub const MAX_QUEUES: u32 = 64;

/// Packet counters of the program since it was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// Passed to the kernel.
    pub passed: u64,
    /// Redirected to a socket.
    pub captured: u64,
    /// Captured, but dropped because there is no socket for the queue.
    pub no_socket: u64,
    /// Dropped by the tc guard while the program was detached.
    pub guarded: u64,
    /// Dropped because policy waits for the maps.
    pub held: u64,
}

/// The loaded program and its maps.
pub struct Steering {
    program: Ebpf,
    /// Program ID.
    id: u32,
    interfaces: Array<MapData, u32>,
    inside_flags: Array<MapData, u32>,
    sockets: XskMap<MapData>,
    maps: Maps,
    applied: Applied,
    outcomes: PerCpuArray<MapData, u64>,
}

impl std::fmt::Debug for Steering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Steering").field("applied", &self.applied).finish_non_exhaustive()
    }
}

impl Steering {
    /// Loads the program for these packet buffers, with empty maps and not attached.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn load(frames: FrameLayout) -> Result<Self, SteeringError> {
        let (object, refused): (_, fn(ProgramError) -> SteeringError) = match frames {
            FrameLayout::Standard | FrameLayout::Page => (OBJECT, SteeringError::Verify),
            FrameLayout::MultiBuffer => (MULTI_BUFFER_OBJECT, SteeringError::MultiBuffer),
        };
        let mut program = EbpfLoader::new().load(object).map_err(SteeringError::Load)?;
        let steer: &mut Xdp = program
            .program_mut(PROGRAM_NAME)
            .ok_or(SteeringError::NoSuchPart(PROGRAM_NAME))?
            .try_into()
            .map_err(SteeringError::Verify)?;
        steer.load().map_err(refused)?;
        let id = steer.info().map_err(SteeringError::Verify)?.id();
        Ok(Self {
            id,
            interfaces: take_map(&mut program, "interfaces")?,
            inside_flags: take_map(&mut program, "inside_flags")?,
            sockets: take_map(&mut program, "sockets")?,
            maps: Maps::take(&mut program)?,
            applied: Applied::default(),
            outcomes: take_map(&mut program, "outcomes")?,
            program,
        })
    }

    /// Sets the ID of an interface, and whether it is an inside interface.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn add_interface(&mut self, ifindex: u32, id: InterfaceId, is_inside: bool) -> Result<(), SteeringError> {
        let error = |table| move |source| SteeringError::Table { table, source };
        self.inside_flags.set(id.0.into(), u32::from(is_inside), 0).map_err(error("inside_flags"))?;
        self.interfaces.set(id.0.into(), ifindex, 0).map_err(error("interfaces"))
    }

    /// Adds the socket of a queue to the XSKMAP.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_socket(&mut self, interface: InterfaceId, queue: u32, socket: i32) -> Result<(), SteeringError> {
        let index = u32::from(interface.0) * MAX_QUEUES + queue;
        self.sockets.set(index, socket, 0).map_err(|source| SteeringError::Table { table: "sockets", source })
    }

    /// Reads the packet counters.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn outcomes(&self) -> Result<Outcomes, SteeringError> {
        let read = |index: u32| {
            let values =
                self.outcomes.get(&index, 0).map_err(|source| SteeringError::Table { table: "outcomes", source })?;
            Ok::<u64, SteeringError>(values.iter().sum())
        };
        Ok(Outcomes { passed: read(0)?, captured: read(1)?, no_socket: read(2)?, guarded: read(3)?, held: read(4)? })
    }

    /// Whether the program captures a frame received on queue 0 of an interface. Runs the program in the kernel
    /// (BPF_PROG_TEST_RUN); the frame isn't forwarded, but counted in the outcomes.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn captures(&mut self, frame: &[u8], ifindex: u32) -> Result<bool, SteeringError> {
        let end = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        // `struct xdp_md` of linux/bpf.h: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let context: Vec<u8> = [0, end, 0, ifindex, 0, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
        let options = TestRunOptions { data_in: Some(frame), ctx_in: Some(&context), ..TestRunOptions::default() };
        let result = self.program_mut()?.test_run(options).map_err(SteeringError::Verify)?;
        Ok(result.return_value != XDP_PASS)
    }

    /// ID of the loaded program.
    pub fn program_id(&self) -> u32 {
        self.id
    }

    /// The tc guard (`guard.rs`), loaded on first use.
    pub(crate) fn guard_fd(&mut self) -> Result<BorrowedFd<'_>, SteeringError> {
        let program = self.program.program_mut(GUARD_NAME).ok_or(SteeringError::NoSuchPart(GUARD_NAME))?;
        let guard: &mut SchedClassifier = program.try_into().map_err(SteeringError::Verify)?;
        if guard.fd().is_err() {
            guard.load().map_err(SteeringError::Verify)?;
        }
        guard.fd().map(AsFd::as_fd).map_err(SteeringError::Verify)
    }

    /// The loaded program.
    pub(crate) fn program_fd(&self) -> Result<BorrowedFd<'_>, SteeringError> {
        let program: &Xdp = self
            .program
            .program(PROGRAM_NAME)
            .ok_or(SteeringError::NoSuchPart(PROGRAM_NAME))?
            .try_into()
            .map_err(SteeringError::Verify)?;
        program.fd().map(AsFd::as_fd).map_err(SteeringError::Verify)
    }

    /// The loaded program, for attachment by a BPF link.
    pub(crate) fn program_mut(&mut self) -> Result<&mut Xdp, SteeringError> {
        let program = self.program.program_mut(PROGRAM_NAME).ok_or(SteeringError::NoSuchPart(PROGRAM_NAME))?;
        program.try_into().map_err(SteeringError::Verify)
    }
}

#[cfg(test)]
mod tests;

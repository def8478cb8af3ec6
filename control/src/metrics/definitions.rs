//! Metric definitions of the gateway, by subject. Those of the policy server are in `policy_server`, of manifests in
//! `source/ingest.rs`, and of connections in `listener.rs`.

pub(crate) mod node;
pub(crate) mod policy_server;

use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::session::end_reason::EndReason;

use crate::metric::{Label, metrics};

const WORKER: Label = Label::any("worker", "number of the worker, from 0");
const DIRECTION: Label = Label::names("direction", || Direction::ALL.map(Direction::name).to_vec());
const DROP_REASON: Label = Label::names("reason", || DropReason::ALL.map(DropReason::name).to_vec());
const END_REASON: Label = Label::names("reason", || EndReason::ALL.map(EndReason::name).to_vec());
const VIP: Label = Label::any("vip", "address of the VIP");
const BLOCK_STATE: Label = Label::one_of("state", &["claimed", "free", "elsewhere"]);
const SCOPE: Label = Label::one_of("scope", &["vip", "shard"]);
const VERSION: Label = Label::any("version", "version of the policy, or of the program");
const UPDATE_RESULT: Label = Label::one_of("result", &["applied", "rejected"]);
const BACKEND_STATE: Label = Label::one_of("state", &["ready", "terminating", "not_ready"]);
const SERVICE: Label = Label::any("service", "namespace and name of the Service");
const POLICY: Label = Label::any("policy", "kind, namespace and name of the egress policy");
const PEER: Label = Label::any("peer", "name of the other gateway");
const INTERFACE: Label = Label::any("interface", "name of the interface");
const ADDRESS: Label = Label::any("address", "address of the next hop");
const OUTCOME: Label = Label::one_of("outcome", &["passed", "captured", "no_socket", "guarded", "held"]);
const CAUSE: Label = Label::one_of("cause", &["receive_ring_full", "fill_ring_empty", "dropped", "invalid_descriptor"]);
const PLACE: Label = Label::one_of("place", &["pool", "device", "held", "total"]);
const TIME: Label = Label::one_of("time", &["elapsed", "worked"]);
const RECORD_RESULT: Label = Label::one_of("result", &["sent", "lost"]);

metrics! {
    /// Packets.
    pub PACKET_METRICS:
    PACKETS = Counter("packets", [WORKER, DIRECTION]): "Packets forwarded";
    BYTES = Counter("bytes", [WORKER, DIRECTION]): "Bytes forwarded, whole frames";
    DROPS = Counter("drops", [DROP_REASON]): "Packets dropped";
    RECEIVED = Counter("received", [WORKER]): "Packets received from AF_XDP sockets";
    REPLIES_SENT = Counter("answered", [WORKER]):
        "ARP and NDP replies, ICMP errors, TCP resets, replies to health checks and announcements sent";
    CONSUMED = Counter("consumed", [WORKER]):
        "Packets consumed without a reply: acknowledgements of health checks and segments of them beyond the rate limit, \
         ARP and NDP claims to VIPs";
    VIP_CONFLICTS = Counter("vip_conflicts", [WORKER]):
        "ARP packets and neighbor advertisements in which another host claims a VIP of this gateway";
    REPLIES_SUPPRESSED = Counter("answers_limited", [WORKER]):
        "ICMP errors, TCP resets and replies to health checks suppressed by the rate limit";
    HANDOFFS = Counter("handoffs", [WORKER]): "Packets handed off to the worker that owns their session";
    OUT_OF_WINDOW = Counter("out_of_window", [WORKER]):
        "TCP segments out of window and SCTP packets with a wrong tag, forwarded without a state change";
    CHECKSUMS_COMPLETED = Counter("checksums_completed", [WORKER]):
        "Packets that a virtual interface had handed on with a partial checksum, which was completed";
    NEIGHBOR_WAITING = Gauge("waiting", [WORKER]): "Packets queued for a neighbor whose MAC address is unresolved";
}

metrics! {
    /// Sessions.
    pub SESSION_METRICS:
    SESSIONS = Gauge("sessions", [WORKER]): "Active sessions";
    SESSIONS_CAPACITY = Gauge("sessions_capacity", []): "Capacity of the session tables of all workers";
    SESSIONS_RESERVE = Gauge("sessions_reserve", [WORKER]):
        "Session table entries reserved for holders below their fair share";
    SESSION_FAIR_SHARE = Gauge("session_fair_share", [WORKER]):
        "Sessions that each VIP is guaranteed, standby sessions included; a VIP may have more while others have fewer";
    SESSIONS_CREATED = Counter("sessions_created", [WORKER]): "Sessions opened";
    STANDBY_SESSIONS = Gauge("standby_sessions", [WORKER]): "Standby sessions, replicated from other gateways";
    STANDBY_REJECTED = Counter("standby_sessions_rejected", [WORKER]):
        "Standby sessions rejected by a full table, or evicted for a session of this gateway";
    SESSIONS_FAILED_OVER = Counter("standby_sessions_activated", [WORKER]):
        "Standby sessions that became active in a failover";
    SESSIONS_ENDED = Counter("sessions_expired", [WORKER, END_REASON]): "Sessions ended, by reason";
}

metrics! {
    /// Ports.
    pub PORT_METRICS:
    VIP_SESSIONS = Gauge("vip_sessions", [VIP]): "Sessions that hold a port of a VIP, including quarantined ones";
    PORT_BLOCKS = Gauge("port_blocks", [VIP, BLOCK_STATE]):
        "Blocks of 64 ports of a VIP: claimed by a worker, free, or elsewhere, in shards of other gateways";
    VIP_SHARD_PORTS = Gauge("vip_shard_ports", [VIP]):
        "Ports of this gateway's shards of a VIP that is split: the maximum of sessions toward one destination";
    VIP_PORTS_EXHAUSTED = Counter("vip_ports_exhausted", [VIP, SCOPE]):
        "Packets refused by port exhaustion, by scope: whole VIP, or shard (others may have had free ports)";
}

metrics! {
    /// Policy and Services.
    pub POLICY_METRICS:
    POLICY_VERSION = Info("policy_version", [VERSION]): "The policy in force";
    POLICY_UPDATES = Counter("policy_updates", [UPDATE_RESULT]): "Policy updates, by result";
    POLICY_CONNECTED = Gauge("policy_connected", []): "Whether the policy source is reachable; always 1 for files";
    POLICY_AGE = Gauge("policy_age_seconds", []):
        "Seconds since the policy in force was last confirmed by the policy server";
    POLICY_CACHED = Gauge("policy_cached", []):
        "Whether the policy is cached for a restart without its server; always 1 for files";
    READY = Gauge("ready", []): "Whether the gateway forwards packets";
    VIPS = Gauge("vips", []): "VIPs of the policy in force";
    ENDPOINTS = Gauge("endpoints", []): "Endpoints of the policy in force";
    SERVICES = Gauge("services", []): "Services of the policy in force";
    BACKENDS = Gauge("backends", [BACKEND_STATE]):
        "Backends of Services, by state; one of several Services counts once for each";
    SERVICE_SESSIONS = Gauge("service_sessions", [SERVICE]): "Active inbound sessions, by Service";
    SERVICE_SESSIONS_CREATED = Counter("service_sessions_created", [SERVICE]): "Inbound sessions opened, by Service";
    REFUSED = Counter("refused", [POLICY]):
        "Sessions refused by quota, port exhaustion or a full session table, by policy";
    BUILD = Info("build", [VERSION]): "Version of the running program";
}

metrics! {
    /// Group of gateways.
    pub GROUP_METRICS:
    ACTIVE = Gauge("serving", []): "Whether this gateway is an active member";
    DRAINING = Gauge("draining", []): "Whether this gateway is draining";
    DRAINS_REFUSED = Counter("drains_refused", []):
        "Drains of this gateway that were refused because no other gateway could take over";
    ACTIVE_MEMBERS = Gauge("members_serving", []): "Number of active members";
    VIEW = Gauge("view", []): "Number of the latest membership view; 0: none yet";
    LEASE = Milliseconds("lease_seconds", []):
        "Remaining time of the lease, without which no sessions are opened; absent if none is required";
    PEER_UP = Gauge("peer_up", [PEER]): "Whether the link to a peer is up";
    PEER_AUTHENTICATED = Gauge("peer_authenticated", [PEER]):
        "Whether tunnel packets from a peer must carry a valid tag";
    PEER_REFUSED = Counter("peer_refused", []): "Connections refused on peer links: unauthenticated, or rejected";
    RECORDS_SENT = Counter("replication_records_sent", [PEER]): "Session records sent to a peer";
    RECORDS_APPLIED = Counter("replication_records_applied", [PEER]): "Session records applied from a peer";
    RECORDS_QUEUED = Gauge("replication_queued_bytes", [PEER]): "Bytes of session records queued for a peer";
    FULL_SYNCS = Counter("replication_resyncs", [PEER]): "Full syncs of sessions to a peer";
}

metrics! {
    /// Interfaces and next hops.
    pub TRACKING_METRICS:
    LINK_UP = Gauge("link_up", [INTERFACE]): "Whether an interface is up and operational";
    NEXT_HOP_UP = Gauge("next_hop_up", [INTERFACE, ADDRESS]):
        "Whether a next hop replies to probes; absent until its first reply";
    XDP_ATTACHED = Gauge("xdp_attached", [INTERFACE]): "Whether the XDP program is attached to an interface";
    XDP_DETACHED = Counter("xdp_detached", [INTERFACE]):
        "How often the XDP program of an interface was found detached or replaced";
    GUARD_DETACHED = Counter("guard_detached", [INTERFACE]):
        "How often the tc guard of an interface was found removed or replaced; absent without a guard";
    MTU_EXCESS = Gauge("interface_mtu_excess_bytes", [INTERFACE]):
        "Bytes by which the MTU of an interface exceeds the longest packet that can be received on it";
}

metrics! {
    /// AF_XDP sockets and the steering program.
    pub DEVICE_METRICS:
    CAPTURE_COMPLETE = Gauge("capture_complete", []):
        "Whether the maps of the XDP program hold all that policy needs; until then, policy waits and is retried";
    CAPTURE_FAILURES = Counter("capture_failures", []):
        "Updates of the XDP program's maps that failed, retries included";
    STEERED_PACKETS = Counter("steered_packets", [OUTCOME]):
        "Packets by outcome of the XDP program: passed to the kernel, captured, dropped for lack of a socket \
         (no_socket), by the tc guard while the XDP program was detached (guarded), or because policy waits (held)";
    RING_LOSSES = Counter("ring_losses", [WORKER, CAUSE]):
        "Packets that the kernel dropped at the rings of AF_XDP sockets, by cause";
    FRAMES = Gauge("frames", [PLACE]):
        "Packet buffers, by place; pool, device and held add up to total, apart from packets of a batch in progress";
}

metrics! {
    /// Process.
    pub PROCESS_METRICS:
    CONTROL_LOOP_STALL = Milliseconds("control_loop_stall_seconds", [TIME]):
        "Longest stall of the control loop in the last minute: elapsed time, and CPU time of the thread (worked)";
    NAT_LOG_RECORDS = Counter("nat_log_records", [RECORD_RESULT]): "Records of the NAT log, by result";
    NAT_LOG_UP = Gauge("nat_log_up", []):
        "Whether the collector of the NAT log is reachable; 1 until an attempt to send has failed";
    LOG_LINES_LOST = Counter("log_lines_lost", []):
        "Lines of the log that were not written: the disk is full, or the reader of stderr has closed it or reads too \
         slowly";
}

//! Metric definitions of the policy server.

use vipgate_cloud::execute::ActionKind;
use vipgate_policy::ipam::Reason;

use crate::metric::{Label, metrics};

const KIND: Label = Label::one_of("kind", &["EgressPolicy", "Vip", "Endpoint", "Service", "Gateway"]);
const INSTEAD: Label = Label::one_of("instead", &["last_good", "nothing"]);
const SEVERITY: Label = Label::one_of("severity", &["error", "warning"]);
const RESPONSE_RESULT: Label = Label::one_of("result", &["accepted", "refused"]);
const SET_ASIDE_FOR: Label = Label::one_of("for", &["one", "all"]);
const STREAM_REASON: Label = Label::one_of("reason", &["certificate", "name_in_use", "secret"]);
const POOL: Label = Label::any("pool", "name of the AddressPool");
const ADDRESS_STATE: Label = Label::one_of("state", &["service", "policy", "quarantined", "free"]);
const CLOUD_STATE: Label = Label::one_of("state", &["attached", "pending", "free", "lacking"]);
const CLOUD_ACTION: Label = Label::names("action", || ActionKind::ALL.iter().map(|kind| kind.as_str()).collect());
const CLOUD_RESULT: Label = Label::one_of("result", &["done", "failed"]);
const OPERATION: Label = Label::any("operation", "operation of the provider's API");
const CODE: Label = Label::any("code", "`OK`, or the provider's error code");
const REFUSAL_REASON: Label = Label::names("reason", || Reason::ALL.iter().map(|reason| reason.as_str()).collect());
const WRITE_PURPOSE: Label = Label::one_of("of", &["addresses", "status", "events"]);
const WRITE_RESULT: Label = Label::one_of("result", &["written", "conflict", "denied", "failed"]);

metrics! {
    /// Policy server.
    pub(crate) POLICY_SERVER_METRICS:
    GATEWAYS = Gauge("policyd_gateways", []): "Connected gateways";
    GATEWAYS_IN_STEP = Gauge("policyd_gateways_in_step", []):
        "Connected gateways that have acknowledged the current policy";
    NODES = Gauge("policyd_nodes", []): "Nodes with connected agents";
    NODES_REJECTING = Gauge("policyd_nodes_refusing", []):
        "Nodes with connected agents that have refused (NACK) their last update";
    RESOURCES = Gauge("policyd_resources", [KIND]): "Resources in the published policy";
    OBJECTS = Gauge("policyd_objects", []): "Objects in force";
    FAULTY_OBJECTS = Gauge("policyd_faulty_objects", [INSTEAD]):
        "Invalid objects, by what is in force instead: their last good version, or nothing";
    DIAGNOSTICS = Gauge("policyd_diagnostics", [SEVERITY]): "Current diagnostics of manifests, by severity";
    SOURCE_CONNECTED = Gauge("policyd_source_connected", []): "Whether the policy source is reachable";
    SOURCE_UPDATES = Counter("policyd_source_updates", []): "Updates received from the policy source";
    PUBLICATIONS = Counter("policyd_publications", []): "Published policy versions";
    RESPONSES = Counter("policyd_responses", []): "Responses sent to gateways and to agents of nodes";
    ACKNOWLEDGEMENTS = Counter("policyd_answers", [RESPONSE_RESULT]):
        "Responses that gateways and agents of nodes accepted (ACK) or refused (NACK)";
    SET_ASIDE = Gauge("policyd_set_aside", [SET_ASIDE_FOR]):
        "Resources that are set aside, for one connected gateway that refuses them, or for all since they are invalid";
    COMPILE_TIME = Milliseconds("policyd_compile_seconds", []): "Duration of the last compilation";
    MEMBERS = Gauge("policyd_members", []): "Gateways in the membership view";
    ACTIVE_MEMBERS = Gauge("policyd_members_serving", []): "Active gateways";
    UNAVAILABLE_MEMBERS = Gauge("policyd_members_unavailable", []):
        "Gateways of the policy that are not active or have a fault";
    MAX_UNAVAILABLE = Gauge("policyd_max_unavailable", []):
        "Gateways that may be unavailable for a further one to be drained; absent: no limit";
    DRAINS_WAITING = Gauge("policyd_drains_waiting", []): "Active gateways whose drain waits for other gateways";
    DRAINS_REFUSED = Counter("policyd_drains_refused", []):
        "Drains refused because no other gateway could take over";
    VIEW = Gauge("policyd_view", []): "Number of the current membership view";
    LEASE_EXPIRIES = Counter("policyd_expiries", []):
        "Gateways that became inactive because their heartbeats timed out or their process was replaced";
    REJECTED_HEARTBEATS = Counter("policyd_rejected_heartbeats", []):
        "Heartbeats rejected because another live process has the gateway's name";
    TLS_REJECTED = Counter("policyd_tls_refused", []):
        "Connections rejected for a missing or invalid client certificate";
    STREAMS_REJECTED = Counter("policyd_gateways_refused", [STREAM_REASON]):
        "Rejected streams of gateways: the certificate or token is another gateway's, a live process has the name, or they \
         claim a process without its secret";
    COMMANDS_DENIED = Counter("policyd_orders_refused", []):
        "Commands (status, cloud, accept-empty) denied to unauthorized clients";
    HELD_BYTES = Gauge("policyd_held_bytes", []):
        "Bytes held for clients: incoming requests, subscriptions, unacknowledged responses";
    MEMORY_REJECTED = Counter("policyd_memory_refused", []): "Requests and streams rejected by the memory limits";
    LEADER = Gauge("policyd_leader", []):
        "Whether this policy server leads: it decides membership, and gives Services their addresses; only with \
         `source.kubernetes`";
    IPAM_ADDRESSES = Gauge("ipam_addresses", [POOL, ADDRESS_STATE]):
        "Addresses of pools: those of Services and of policies, those that became free and that nobody else gets yet, and \
         those that are free for all; from the leader";
    IPAM_REFUSED = Gauge("ipam_refused", [REFUSAL_REASON]):
        "Services that don't get an address that they ask for, by reason; from the leader";
    CLOUD_REACHABLE = Gauge("cloud_reachable", [POOL]):
        "Whether the last observation of a pool's provider succeeded";
    CLOUD_ADDRESSES = Gauge("cloud_addresses", [POOL, CLOUD_STATE]):
        "Public addresses of pools with a provider: VIPs that are attached to the gateway that owns them, VIPs that are \
         not, free ones";
    CLOUD_ACTIONS = Counter("cloud_actions", [POOL, CLOUD_ACTION, CLOUD_RESULT]):
        "Changes at the provider, each of one or several addresses, by result";
    CLOUD_REQUESTS = Counter("cloud_requests", [POOL, OPERATION, CODE]): "Requests to the provider, by result";
    CLOUD_REPAIRED = Counter("cloud_repaired", [POOL]): "VIPs that somebody else had detached";
    CLOUD_ATTACH_TIME = Milliseconds("cloud_attach_seconds", [POOL]):
        "Time from when a gateway owned a VIP until it was attached there, of the last one";
    WRITES = Counter("policyd_writes", [WRITE_PURPOSE, WRITE_RESULT]):
        "Writes to the Kubernetes API: addresses to the status of Services and AddressPools, the status of vipgate's \
         objects, and Events; by result, of which `conflict`: the object was changed or deleted meanwhile";
    STATUS_PENDING = Gauge("policyd_status_pending", []):
        "Objects whose status is still to be written; from the leader";
    EVENTS_DROPPED = Counter("policyd_events_dropped", []): "Kubernetes Events that weren't written: too many at once";
}

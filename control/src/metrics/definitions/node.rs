//! Metric definitions of the node agent.

use vipgate_node::drops::Reason;

use crate::metric::{Label, metrics};

const GATEWAY: Label = Label::any("gateway", "name of the gateway");
const DIRECTION: Label = Label::one_of("direction", &["to", "from"]);
const POD_STATE: Label = Label::one_of("state", &["covered", "uncovered", "no_vip", "unreachable"]);
const REASON: Label = Label::names("reason", || Reason::ALL.iter().map(|reason| reason.as_str()).collect());
const HELD_RESULT: Label = Label::one_of("result", &["released", "dropped"]);

metrics! {
    /// Node agent.
    pub(crate) NODE_METRICS:
    CONNECTED = Gauge("node_policy_connected", []): "Whether the agent has a stream to a policy server";
    VIEW = Gauge("node_view", []): "Number of the membership view; 0: none";
    PODS = Gauge("node_pods", [POD_STATE]):
        "Addresses of pods on the node; `no_vip`, `unreachable`: covered, but without a VIP or without a gateway";
    REACHABLE = Gauge("node_gateway_reachable", [GATEWAY]): "Whether the gateway answers echo requests in its tunnel";
    USABLE = Gauge("node_gateway_usable", [GATEWAY]): "Whether packets can be sent to the gateway";
    PACKETS = Counter("node_gateway_packets", [GATEWAY, DIRECTION]): "Packets in the tunnel of the gateway";
    BYTES = Counter("node_gateway_bytes", [GATEWAY, DIRECTION]):
        "Bytes in the tunnel of the gateway, without the headers of the tunnel";
    DROPS = Counter("node_drops", [REASON]): "Packets that the node's rules dropped, by reason";
    HELD = Gauge("node_held_packets", []): "Packets held of pods that policy doesn't know yet";
    HELD_ENDED = Counter("node_held", [HELD_RESULT]): "Packets that were held, by what became of them";
    PROGRAMMED = Gauge("node_kernel_programmed", []): "Whether the kernel has what the agent has planned";
    REPAIRS = Counter("node_kernel_repairs", []): "How often something was repaired that others had changed";
    MARK_USERS = Gauge("node_mark_conflicts", []): "Rules of others that use bits of `mark_mask`";
}

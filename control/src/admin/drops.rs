//! `Drops` request: drops by reason and by address, each with its last packet.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::observe::drops::{self, DropRecord};
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::spec::NetworkSpec;
use vipgate_dataplane::worker::command::{Command, DropChunk};

use super::filter::{protocol_name, source_and_destination};
use super::ports;
use super::protocol::RequestError;
use crate::admin::workers::Workers;
use crate::state::GatewayState;

/// Limit of reported pairs of reason and address, those with most packets first.
const MAX_RECORDS: usize = 1000;
/// Limit of reported VIPs with port exhaustion.
const MAX_EXHAUSTED_VIPS: usize = 10;

/// Drops by reason, and by address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropsReply {
    pub drops: Vec<Drop>,
    /// Top addresses by reason; a bounded number.
    pub by_address: Vec<DropsOf>,
}

/// Packets that were dropped for one reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drop {
    pub reason: String,
    pub packets: u64,
    pub help: String,
    /// The last dropped packet, if there is any.
    pub last: Option<DropExample>,
    /// Known causes and remedies, one per line.
    pub notes: Vec<String>,
}

/// A dropped packet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropExample {
    pub age_ms: u64,
    pub interface: String,
    /// tcp, udp, sctp, icmp, icmpv6, or a number; empty: not an IP packet.
    pub protocol: String,
    /// Address and port, or an address alone.
    pub source: String,
    pub destination: String,
}

/// Packets of one address that were dropped for one reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropsOf {
    pub reason: String,
    /// The source of packets from the inside, the destination of packets from the outside.
    pub address: String,
    /// Name of the pod or the VIP; empty: unknown.
    pub name: String,
    /// The policy that covers it; empty: none.
    pub policy: String,
    /// Upper bound of the number of packets, and its maximum error (packets of other addresses).
    pub packets: u64,
    pub doubt: u64,
    pub last: DropExample,
}

/// Age in milliseconds, and the packet.
type AgedExample = (u32, drops::DropExample);

/// Drops of all workers.
pub(super) async fn all(state: &GatewayState, workers: &Workers) -> Result<DropsReply, RequestError> {
    let mut last: BTreeMap<DropReason, AgedExample> = BTreeMap::new();
    let mut records: BTreeMap<(DropReason, IpAddr), (DropRecord, u32)> = BTreeMap::new();
    for worker in 0..state.workers().len() {
        let room = Vec::with_capacity(drops::MAX_RECORDS);
        let chunk = Box::new(DropChunk { now: Tick(0), last: [None; DropReason::ALL.len()], records: room });
        let chunk = workers.query(worker, |reply| Command::Drops { chunk, reply }).await?;
        for (reason, example) in DropReason::ALL.into_iter().zip(chunk.last) {
            let Some(example) = example else { continue };
            let age = chunk.now.since(example.at);
            let known = last.entry(reason).or_insert((age, example));
            if age < known.0 {
                *known = (age, example);
            }
        }
        for record in chunk.records {
            let age = chunk.now.since(record.last.at);
            merge(records.entry((record.reason, record.address)), record, age);
        }
    }
    let (policy, network) = (state.compiled.load(), state.network.load());
    let drops = DropReason::ALL.into_iter().zip(state.all_drops()).map(|(reason, packets)| Drop {
        reason: reason.name().to_owned(),
        packets,
        help: reason.help().to_owned(),
        notes: match reason {
            DropReason::PortsExhausted => ports::all_exhaustion_notes(&policy, state, MAX_EXHAUSTED_VIPS),
            _ => Vec::new(),
        },
        last: last.get(&reason).map(|aged| example(aged, &network)),
    });
    let mut by_address: Vec<_> = records.into_values().collect();
    by_address.sort_by_key(|(record, _)| std::cmp::Reverse(record.packets));
    by_address.truncate(MAX_RECORDS);
    let by_address = by_address.into_iter().map(|(record, age)| {
        let (name, policy) = owner(record.address, &policy);
        DropsOf {
            reason: record.reason.name().to_owned(),
            address: record.address.to_string(),
            name,
            policy,
            packets: record.packets,
            doubt: record.max_error,
            last: example(&(age, record.last), &network),
        }
    });
    Ok(DropsReply { drops: drops.collect(), by_address: by_address.collect() })
}

/// Merges another worker's record of the same reason and address.
fn merge<K: Ord>(entry: std::collections::btree_map::Entry<'_, K, (DropRecord, u32)>, record: DropRecord, age: u32) {
    entry
        .and_modify(|(sum, youngest)| {
            sum.packets += record.packets;
            sum.max_error += record.max_error;
            if age < *youngest {
                (sum.last, *youngest) = (record.last, age);
            }
        })
        .or_insert((record, age));
}

/// The name of an address's endpoint or VIP, and the policy that covers it; empty where there is none.
fn owner(address: IpAddr, policy: &Policy) -> (String, String) {
    if let Some(endpoint) = policy.endpoint_at(address) {
        return (endpoint.name.to_string(), policy.egress_of(endpoint).spec.name.to_string());
    }
    (policy.vip_at(address).map(|vip| vip.name.to_string()).unwrap_or_default(), String::new())
}

fn example((age, example): &AgedExample, network: &NetworkSpec) -> DropExample {
    let interface = network.interfaces.get(usize::from(example.interface.0));
    let (protocol, [source, destination]) =
        example.packet.map(|it| (protocol_name(it.protocol), source_and_destination(&it))).unwrap_or_default();
    DropExample {
        age_ms: (*age).into(),
        interface: interface.map(|it| it.name.clone()).unwrap_or_default(),
        protocol,
        source,
        destination,
    }
}

//! Drops by reason, and by whom, with the last example of each.

use std::collections::BTreeMap;
use std::net::IpAddr;

use tonic::Status;
use vipgate_dataplane::command::{Command, DropChunk};
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::snapshot::policy::Policy;
use vipgate_dataplane::snapshot::spec::NetworkSpec;
use vipgate_dataplane::time::Tick;
use vipgate_dataplane::watch::drops::{self, DropRecord, Example};

use super::filter::{ends, protocol_name};
use super::ports;
use super::proto::{Drop, DropExample, DropsOf, DropsReply};
use super::sessions::Workers;
use crate::gateway::state::GatewayState;

/// Reasons and addresses that are told at most, those with most packets first.
const MOST: usize = 1000;
/// VIPs without ports that are told of.
const SHORTAGES: usize = 10;

/// An example, and how long ago it was.
type Aged = (u32, Example);

/// What all workers have dropped.
pub(super) async fn all(state: &GatewayState, workers: &Workers) -> Result<DropsReply, Status> {
    let mut last: BTreeMap<DropReason, Aged> = BTreeMap::new();
    let mut records: BTreeMap<(DropReason, IpAddr), (DropRecord, u32)> = BTreeMap::new();
    for worker in 0..state.workers.len() {
        let room = Vec::with_capacity(drops::MOST);
        let chunk = Box::new(DropChunk { now: Tick(0), last: [None; DropReason::ALL.len()], records: room });
        let chunk = workers.ask(worker, |reply| Command::Drops { chunk, reply }).await?;
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
            add(records.entry((record.reason, record.address)), record, age);
        }
    }
    let (policy, network) = (state.compiled.load(), state.network.load());
    let drops = DropReason::ALL.into_iter().zip(state.all_drops()).map(|(reason, packets)| Drop {
        reason: reason.name().to_owned(),
        packets,
        help: reason.help().to_owned(),
        notes: match reason {
            DropReason::PortsExhausted => ports::shortages(&policy, state, SHORTAGES),
            _ => Vec::new(),
        },
        last: last.get(&reason).map(|aged| example(aged, &network)),
    });
    let mut by_address: Vec<_> = records.into_values().collect();
    by_address.sort_by_key(|(record, _)| std::cmp::Reverse(record.packets));
    by_address.truncate(MOST);
    let by_address = by_address.into_iter().map(|(record, age)| {
        let (name, policy) = whose(record.address, &policy);
        DropsOf {
            reason: record.reason.name().to_owned(),
            address: record.address.to_string(),
            name,
            policy,
            packets: record.packets,
            doubt: record.doubt,
            last: Some(example(&(age, record.last), &network)),
        }
    });
    Ok(DropsReply { drops: drops.collect(), by_address: by_address.collect() })
}

/// Adds what another worker has dropped of the same address.
fn add<K: Ord>(entry: std::collections::btree_map::Entry<'_, K, (DropRecord, u32)>, record: DropRecord, age: u32) {
    entry
        .and_modify(|(sum, youngest)| {
            sum.packets += record.packets;
            sum.doubt += record.doubt;
            if age < *youngest {
                (sum.last, *youngest) = (record.last, age);
            }
        })
        .or_insert((record, age));
}

/// The name of an address and the policy that covers it, as far as there are any.
fn whose(address: IpAddr, policy: &Policy) -> (String, String) {
    if let Some(endpoint) = policy.endpoint_at(address) {
        return (endpoint.name.to_string(), policy.egress_of(endpoint).spec.name.to_string());
    }
    (policy.vip_at(address).map(|vip| vip.name.to_string()).unwrap_or_default(), String::new())
}

fn example((age, example): &Aged, network: &NetworkSpec) -> DropExample {
    let interface = network.interfaces.get(usize::from(example.interface.0));
    let (protocol, [source, destination]) =
        example.packet.map(|it| (protocol_name(it.protocol), ends(&it))).unwrap_or_default();
    DropExample {
        age_ms: (*age).into(),
        interface: interface.map(|it| it.name.clone()).unwrap_or_default(),
        protocol,
        source,
        destination,
    }
}

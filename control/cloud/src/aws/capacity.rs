//! Private addresses that an ENI can have, by the type of its instance.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::query::{filters, list, one};
use super::reply::{DescribeInstanceTypes, DescribeInstances, NetworkInfo};
use super::{Aws, DESCRIBE_INSTANCES, DESCRIBE_TYPES};
use crate::api::pages;
use crate::error::CloudError;
use crate::provider::Capacity;

/// How long the type of an instance is taken for the same: it changes only while the instance is stopped.
const MAX_AGE: Duration = Duration::from_mins(10);

/// Types of instances, and what they permit.
#[derive(Debug, Default)]
pub(super) struct InstanceTypes {
    of_instance: BTreeMap<String, (String, Instant)>,
    /// Private addresses per interface, by type.
    addresses: BTreeMap<String, Capacity>,
}

impl InstanceTypes {
    /// Private addresses per interface of each of these instances. One that doesn't exist is left out.
    pub(super) async fn limits(
        &mut self,
        aws: &Aws,
        instances: &BTreeSet<&str>,
    ) -> Result<BTreeMap<String, Capacity>, CloudError> {
        let now = Instant::now();
        self.of_instance.retain(|id, (_, at)| instances.contains(&**id) && now.duration_since(*at) < MAX_AGE);
        let unknown: Vec<&str> = instances.iter().copied().filter(|id| !self.of_instance.contains_key(*id)).collect();
        if !unknown.is_empty() {
            self.read_instances(aws, &unknown, now).await?;
        }
        let types: BTreeSet<&str> = self.of_instance.values().map(|(name, _)| name.as_str()).collect();
        let missing: Vec<String> =
            types.into_iter().filter(|name| !self.addresses.contains_key(*name)).map(str::to_owned).collect();
        if !missing.is_empty() {
            let reply: DescribeInstanceTypes = aws.query.call(DESCRIBE_TYPES, &list("InstanceType", missing)).await?;
            let limit = |info: NetworkInfo| Capacity {
                v4: info.ipv4_addresses_per_interface,
                v6: info.ipv6_addresses_per_interface,
            };
            let limits = reply.instance_type_set.items.into_iter();
            self.addresses.extend(limits.map(|it| (it.instance_type, limit(it.network_info))));
        }
        let limit = |(id, (name, _)): (&String, &(String, Instant))| Some((id.clone(), *self.addresses.get(name)?));
        Ok(self.of_instance.iter().filter_map(limit).collect())
    }

    async fn read_instances(&mut self, aws: &Aws, ids: &[&str], now: Instant) -> Result<(), CloudError> {
        // A filter: an id that doesn't exist is no error.
        let filter = &filters([("instance-id".to_owned(), ids.to_vec())]);
        let reservations = pages(DESCRIBE_INSTANCES, |next| async move {
            let parameters: Vec<_> = filter.iter().cloned().chain(next.map(|next| one("NextToken", next))).collect();
            let reply: DescribeInstances = aws.query.call(DESCRIBE_INSTANCES, &parameters).await?;
            Ok((reply.reservation_set.items, reply.next_token))
        });
        let instances = reservations.await?.into_iter().flat_map(|it| it.instances_set.items);
        self.of_instance.extend(instances.map(|it| (it.instance_id, (it.instance_type, now))));
        Ok(())
    }
}

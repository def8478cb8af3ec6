//! Reads of addresses and ENIs by id or filter.

use std::collections::BTreeMap;

use super::query::{filters, list, one};
use super::reply::{Address, DescribeAddresses, DescribeNetworkInterfaces, NetworkInterface};
use super::{Aws, DESCRIBE_ADDRESSES, DESCRIBE_INTERFACES};
use crate::api::pages;
use crate::error::{CloudError, ErrorKind};
use crate::provider::{AddressId, NicId, PublicAddress};

/// Values of a filter at most.
pub(super) const MAX_VALUES: usize = 200;

/// The addresses with these allocation ids, as they are now. One that doesn't exist is left out.
pub(super) async fn addresses(aws: &Aws, all: &[PublicAddress]) -> Result<BTreeMap<AddressId, Address>, CloudError> {
    if all.is_empty() {
        return Ok(BTreeMap::new());
    }
    let ids = all.iter().map(|address| address.id.0.as_str());
    let parameters = filters([("allocation-id".to_owned(), ids.take(MAX_VALUES).collect())]);
    let reply: DescribeAddresses = aws.query.call(DESCRIBE_ADDRESSES, &parameters).await?;
    Ok(reply.addresses_set.items.into_iter().map(|it| (AddressId(it.allocation_id.clone()), it)).collect())
}

/// An ENI as it is now.
pub(super) async fn interface(aws: &Aws, nic: &NicId) -> Result<NetworkInterface, CloudError> {
    let parameters = list("NetworkInterfaceId", [nic.0.as_str()]);
    let reply: DescribeNetworkInterfaces = aws.query.call(DESCRIBE_INTERFACES, &parameters).await?;
    let missing =
        || CloudError::new(ErrorKind::NotFound, DESCRIBE_INTERFACES.name, "InvalidNetworkInterfaceID.NotFound", &nic.0);
    reply.network_interface_set.items.into_iter().next().ok_or_else(missing)
}

/// The ENIs that a filter finds.
pub(super) async fn filtered(aws: &Aws, name: &str, values: Vec<&str>) -> Result<Vec<NetworkInterface>, CloudError> {
    let filter = &filters([(name.to_owned(), values)]);
    pages(DESCRIBE_INTERFACES, |next| async move {
        let parameters: Vec<_> = filter.iter().cloned().chain(next.map(|next| one("NextToken", next))).collect();
        let reply: DescribeNetworkInterfaces = aws.query.call(DESCRIBE_INTERFACES, &parameters).await?;
        Ok((reply.network_interface_set.items, reply.next_token))
    })
    .await
}

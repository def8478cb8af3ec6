//! A provider's actions, one a method, and what else the tests of providers have in common.

use std::net::IpAddr;

use ipnet::IpNet;
use vipgate_cloud::plan::Action;
use vipgate_cloud::{Allocation, Binding, Claim, CloudError, ErrorKind, Nic, NicId, Provider, PublicAddress, Scope};

pub(crate) type Done = Result<(), CloudError>;

pub(crate) trait Calls: Provider {
    async fn claim(&self, address: &PublicAddress, claim: &Claim) -> Done {
        self.execute(&Action::Claim(address.clone(), claim.clone()), &[]).await
    }

    async fn unclaim(&self, address: &PublicAddress) -> Done {
        self.execute(&Action::Unclaim(address.clone()), &[]).await
    }

    async fn prepare(&self, nic: &Nic, addresses: &[PublicAddress], candidates: &[IpNet]) -> Done {
        self.execute(&Action::Prepare(nic.clone(), addresses.to_vec()), candidates).await
    }

    async fn unprepare(&self, nic: &Nic, bindings: &[Binding]) -> Done {
        self.execute(&Action::Unprepare(nic.clone(), bindings.to_vec()), &[]).await
    }

    async fn attach(&self, nic: &Nic, bindings: &[Binding]) -> Done {
        self.execute(&Action::Attach(nic.clone(), bindings.to_vec()), &[]).await
    }

    async fn move_from_dead(&self, from: &NicId, nic: &Nic, bindings: &[Binding]) -> Done {
        self.execute(&Action::Move(from.clone(), nic.clone(), bindings.to_vec()), &[]).await
    }

    async fn detach(&self, from: &NicId, addresses: &[PublicAddress]) -> Done {
        self.execute(&Action::Detach(from.clone(), addresses.to_vec()), &[]).await
    }

    /// Allocates an address, and observes it.
    async fn allocate(&self, allocation: &Allocation) -> Result<PublicAddress, CloudError> {
        self.execute(&Action::Allocate(allocation.clone()), &[]).await?;
        let scope = Scope { tags: allocation.tags.clone(), ..Scope::default() };
        let observed = self.observe(&scope).await?.addresses;
        Ok(observed.into_iter().find(|it| it.token.as_ref() == Some(&allocation.token)).expect("the allocated address"))
    }

    async fn release(&self, address: &PublicAddress) -> Done {
        self.execute(&Action::Release(address.clone()), &[]).await
    }
}

impl<P: Provider> Calls for P {}

pub(crate) fn our_claim() -> Claim {
    Claim { cluster: "prod".to_owned(), owner: "shop/web".to_owned() }
}

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// The kind of the error that there must be.
pub(crate) fn kind<T: std::fmt::Debug>(result: Result<T, CloudError>) -> ErrorKind {
    result.expect_err("an error").kind
}

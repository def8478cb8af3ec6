//! nftables: the contents of the table `inet vipgate`, and the scripts that take the kernel from one to another.

pub mod listing;
pub mod script;
pub mod table;

"""Plain data for all other packages: jobs, plans, settings, messages, states. It imports no other
package of Plait."""

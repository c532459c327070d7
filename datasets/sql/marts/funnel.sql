-- funnel: how many rows each rule met.
-- Grain: one row per step and family; family `all` is the sum over families.
--   step    varchar  what was counted
--   family  varchar  kind of problem, or `all`
--   rows    bigint   number of rows
with steps as (
    select 'read' as step, family from stg_rows where benchmark is null
    union all
    select 'quarantined', family from stg_rows where benchmark is null and reason is not null
    union all
    select 'quarantined in benchmarks', family from stg_rows where benchmark is not null and reason is not null
    union all
    select rule, family from dropped
    union all
    select 'kept', family from pools
    union all
    select concat('pool ', coalesce(pool, 'none')), family from pools
    union all
    select concat('benchmark ', benchmark), family from benchmarks
),

final as (
    select step, coalesce(family, 'all') as family, count(*) as rows
    from steps
    group by grouping sets ((step, family), (step))
)

select * from final
